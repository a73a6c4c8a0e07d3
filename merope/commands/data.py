"""Commands about data: curate, synth, cache."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from merope.commands.models import add_config, add_part, require_config, require_files, seed, user_path

if TYPE_CHECKING:
    from merope.curation.path_tables import PathTable
    from merope.formats.trajectory import Trajectory


def add_curate(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--poses", type=user_path, nargs="+", help="pose files of equal length, in any format that is read"
    )
    source.add_argument("--videos", type=user_path, metavar="MANIFEST", help='clips to train on with kind = "videos"')
    source.add_argument("--nuscenes", type=user_path, metavar="ROOT", help="windows of a nuScenes camera")
    source.add_argument("--config", type=user_path, help="the training clips of a config, such as those of a mixture")
    parser.add_argument(
        "--root", type=user_path, help="data.root of the videos; the folder of their manifest by default"
    )
    parser.add_argument(
        "--metric", action="store_true", help="the pose files are in metres, whatever their format says"
    )
    parser.add_argument("--version", default="v1.0-trainval", help="folder of nuScenes tables (%(default)s)")
    parser.add_argument("--frames", type=int, default=49, help="of a nuScenes window, or of a clip of videos (49)")
    parser.add_argument("--step", type=int, default=1, help="frames between the beginnings of windows (1)")
    parser.add_argument("--clusters", type=int, default=256, help="at most so many (256)")
    parser.add_argument(
        "--suppression", type=float, default=1.0, metavar="METRES", help="Fréchet distance to keep apart (1)"
    )
    parser.add_argument("--scope", choices=("cluster", "global"), default="cluster", help="where to compare (cluster)")
    parser.add_argument("--seed", type=seed, default=0, help="of the clusters (0)")
    parser.add_argument(
        "--out", type=user_path, default=Path("outputs/curation"), help="for manifest and picture (outputs/curation)"
    )
    add_part(parser)
    parser.epilog = "e.g. merope curate --poses drives/*.txt --clusters 16 --out outputs/curation"
    parser.set_defaults(run=_curate)


def _curate(options: argparse.Namespace) -> int:
    require_files(options, "--poses", "--videos", "--nuscenes", "--root")
    if options.config is not None:
        require_config(options.config)
    from merope.curation.curate import summary
    from merope.curation.path_tables import curate_table, read_part

    table = _paths(options)
    if options.part is not None:
        read_part(table, options.out, options.part)
        print(f"part {options.part} is read; without --part the command curates all paths")
        return 0
    clusters = min(options.clusters, len(table.names))
    curation = curate_table(table, options.out, clusters, options.suppression, options.seed, options.scope)
    counts = summary(curation)
    print(", ".join(f"{name}: {value}" for name, value in counts.items() if isinstance(value, int)))
    print(f"wrote {options.out / 'manifest.jsonl'}, curation.json and curation.png")
    return 0


def _paths(options: argparse.Namespace) -> "PathTable":
    """The paths that are to be curated. Those of pose files and videos are checked as they are read."""
    from merope.curation.path_tables import PathTable, states_of
    from merope.datasets.nuscenes import NuScenes
    from merope.datasets.videos import VideoSource, read_video_rows
    from merope.errors import invalid
    from merope.formats import read
    from merope.formats.checks import require_sound

    if options.config is not None:
        return _paths_of_config(options.config)
    if options.nuscenes is not None:
        data = NuScenes(options.nuscenes, options.version)
        windows = data.windows(options.frames, step=options.step)
        if not windows:
            raise invalid("frames", f"at most {data.longest_scene}, the longest scene", options.frames, "ask for fewer")
        names = [data.name(window) for window in windows]
        return PathTable(names, lambda row: data.trajectory(windows[row]), repr((options.frames, options.version)))
    is_metric = True if options.metric else None
    if options.videos is not None:
        root = options.videos.parent if options.root is None else options.root
        source = VideoSource(read_video_rows(options.videos), root, options.frames, height=1, width=1)
        names = [source.name(index) for index in range(len(source))]
        files = list(dict.fromkeys(root / poses for row in source.rows for poses in row.pose_files))
    else:
        names, files = [str(path) for path in options.poses], options.poses

    def sound(row: int) -> "Trajectory":
        path = source.trajectory(row) if options.videos is not None else read(options.poses[row], is_metric=is_metric)
        path = replace(path, name=names[row], is_metric=path.is_metric or options.metric)
        require_sound(path, path.name)
        return path

    return PathTable(names, sound, repr((options.frames, options.metric, states_of(files))))


def _paths_of_config(file: Path) -> "PathTable":
    """The paths of all training clips, under the names that training knows them by."""
    from merope.curation.path_tables import PathTable
    from merope.datasets.data_kind import FileData
    from merope.errors import invalid
    from merope.train.config import TrainConfig
    from merope.train.toml_config import read_config

    data = read_config(TrainConfig, file).data
    if not isinstance(data, FileData):
        raise invalid("data.kind", "one with files", repr(data.kind), "worlds are never drawn twice")
    source = data.training_clips()
    for doubt in source.doubts():
        print(f"merope: {doubt}", file=sys.stderr)
    return PathTable([source.name(index) for index in range(len(source))], source.trajectory, repr(data))


def add_synth(parser: argparse.ArgumentParser) -> None:
    layout = 'what the folder looks like (nuscenes); videos is for data.kind = "videos"'
    parser.add_argument("--layout", choices=("nuscenes", "videos"), default="nuscenes", help=layout)
    parser.add_argument("--out", type=user_path, required=True, help="folder of the data set, new or empty")
    parser.add_argument("--version", default="v1.0-mini", help="folder of nuScenes tables inside it (%(default)s)")
    parser.add_argument("--scenes", type=int, default=2, help="how many drives (2)")
    parser.add_argument("--frames", type=int, default=60, help="frames of a scene, at 12 Hz (60)")
    parser.add_argument("--size", type=int, nargs=2, default=(144, 256), metavar=("HEIGHT", "WIDTH"), help="(144 256)")
    parser.add_argument("--seed", type=seed, default=0, help="of streets and drives (0)")
    add_part(parser)
    parser.epilog = "e.g. merope data synth --layout videos --out drives --scenes 4"
    parser.set_defaults(run=_synth, if_stopped="; finished scenes are kept, run the same command to go on")


def _synth(options: argparse.Namespace) -> int:
    from merope.datasets.synth import synthesise_nuscenes, synthesise_videos

    height, width = options.size
    what = (options.scenes, options.frames, height, width, options.seed, options.part)
    if options.layout == "videos":
        synthesise_videos(options.out, *what)
    else:
        synthesise_nuscenes(options.out, options.version, *what)
    if options.part is not None:
        print(f"part {options.part} is rendered; without --part the command writes the rest")
        return 0
    print(f"wrote {options.scenes} scenes of {options.frames} frames to {options.out}")
    return 0


def add_cache(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "TOML file of a training run whose data come from files")
    parser.add_argument(
        "--out", type=user_path, required=True, help="folder of the cache; an interrupted one is completed"
    )
    parser.add_argument("--validation", action="store_true", help="cache the validation clips instead")
    parser.add_argument("--source", metavar="NAME", help="which source of a mixture to cache")
    add_part(parser)
    parser.epilog = "e.g. merope data cache run.toml --out outputs/cache"
    parser.set_defaults(run=_cache, if_stopped="; finished clips are kept, run the same command to go on")


def _cache(options: argparse.Namespace) -> int:
    require_config(options.config)
    from merope.formats.stores import is_remote, url_of
    from merope.train.caching import cache_clips, of_source
    from merope.train.config import TrainConfig
    from merope.train.toml_config import read_config

    config = read_config(TrainConfig, options.config, options.set)
    if options.source is not None:
        config = of_source(config, options.source)
    skipped = cache_clips(config, options.out, options.validation, options.part)
    if options.part is not None:
        print(f"part {options.part} is encoded; without --part the command lists all clips")
    out = url_of(options.out) if is_remote(options.out) else options.out
    print(f"wrote {out}" + (f"; {len(skipped)} clips could not be read" if skipped else ""))
    return 1 if skipped else 0
