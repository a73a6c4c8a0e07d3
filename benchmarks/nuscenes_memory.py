"""Peak memory and time of reading nuScenes tables of 2.6 million rows.

    python benchmarks/nuscenes_memory.py [--rows 2600000] [--out benchmarks/results/nuscenes-memory.json]

Writes synthetic tables of that size in the official layout (12 sensors, one of them the front camera), then reads them
in a fresh process and reports its peak resident memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SENSORS = ("CAM_FRONT", *(f"SENSOR_{n:02d}" for n in range(11)))
VERSION = "v1.0-trainval"


def write_tables(folder: Path, rows: int) -> None:
    """Tables of `rows` sample_data and ego_pose rows, spread over scenes of 2,880 rows."""
    folder.mkdir(parents=True)
    pose = {"rotation": [0.5720320396729045, -0.0016977771610471074, 0.011798001930183783, -0.8201446642457809]}
    mounting = {
        "translation": [1.7, 0.01, 1.5],
        **pose,
        "camera_intrinsic": [[1266.4, 0, 816.3], [0, 1266.4, 491.5], [0, 0, 1]],
    }
    scene = {"log_token": "log", "description": "synthetic"}
    small: dict[str, list[dict[str, object]]] = {
        "sensor": [{"token": name, "channel": name, "modality": "camera"} for name in SENSORS],
        "calibrated_sensor": [{"token": f"c{name}", "sensor_token": name, **mounting} for name in SENSORS],
        "scene": [{"token": f"scene{n}", "name": f"scene-{n}", **scene} for n in range(rows // 2880 + 1)],
        "sample": [{"token": f"sample{n}", "scene_token": f"scene{n // 40}"} for n in range(rows // 72 + 1)],
        "log": [{"token": "log", "logfile": "log", "location": "synthville"}],
    }
    for name, table in small.items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    with (folder / "sample_data.json").open("w") as images, (folder / "ego_pose.json").open("w") as poses:
        for n in range(rows):
            before = "[\n" if n == 0 else ",\n"
            images.write(before + json.dumps(image_row(n)))
            ego = {
                "token": f"{n:032x}",
                "timestamp": time_us(n),
                **pose,
                "translation": [411.3 + n * 1e-4, 1180.9, 0.0],
            }
            poses.write(before + json.dumps(ego))
        images.write("\n]")
        poses.write("\n]")


def time_us(row: int) -> int:
    """12 sensors at 12 Hz each."""
    return 1_532_402_927_000_000 + 83_333 * (row // 12)


def image_row(row: int) -> dict[str, object]:
    """A row of sample_data as long as a real one."""
    sensor = SENSORS[row % 12]
    tokens = {"token": f"{row:032x}", "sample_token": f"sample{row // 72}", "ego_pose_token": f"{row:032x}"}
    file = {
        "filename": f"sweeps/{sensor}/n015-2018-07-24-11-22-45+0800__{sensor}__{time_us(row)}.jpg",
        "fileformat": "jpg",
    }
    size = {"width": 1600, "height": 900, "is_key_frame": False, "prev": f"{row:032x}", "next": f"{row:032x}"}
    return {**tokens, "calibrated_sensor_token": f"c{sensor}", "timestamp": time_us(row), **file, **size}


def read_tables(root: Path) -> None:
    """What the fresh process does."""
    from merope.datasets.nuscenes import NuScenes

    start = time.time()
    data = NuScenes(root, VERSION)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = round(time.time() - start, 1)
    print(json.dumps({"frames": len(data.frames.filename), "seconds": seconds, "peak_mib": round(peak_mib)}))


def main() -> None:
    """Write, read in a fresh process, report."""
    parser = argparse.ArgumentParser(description="peak memory of the nuScenes reader")
    parser.add_argument("--rows", type=int, default=2_600_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/nuscenes-memory.json"))
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        return read_tables(options.read)
    with tempfile.TemporaryDirectory() as folder:
        print(f"writing {options.rows} rows", file=sys.stderr)
        write_tables(Path(folder) / VERSION, options.rows)
        size_mib = sum(f.stat().st_size for f in (Path(folder) / VERSION).iterdir()) / 2**20
        command = [sys.executable, __file__, "--read", folder]
        measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    result = {"rows": options.rows, "tables_mib": round(size_mib), **measured}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
