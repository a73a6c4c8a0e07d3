"""A further camera for a small data set in nuScenes' layout."""

import json
import shutil
from pathlib import Path
from typing import Any


def add_camera(
    root: Path, version: str, channel: str, skew_us: int, ahead_m: float = 0.25, focal: float = 40.0
) -> None:
    """A camera that fires `skew_us` after the front one, from where the car then is, `ahead_m` further along x.

    It shows the same images and is mounted like the front camera.
    """

    def table(name: str) -> Any:
        return json.loads((root / version / f"{name}.json").read_text())

    sensors, calibrations, poses, images = map(table, ("sensor", "calibrated_sensor", "ego_pose", "sample_data"))
    front = next(row["token"] for row in sensors if row["channel"] == "CAM_FRONT")
    own = next(row for row in calibrations if row["sensor_token"] == front)
    matrix = [[focal, 0.0, own["camera_intrinsic"][0][2]], [0.0, focal, own["camera_intrinsic"][1][2]], [0.0, 0.0, 1.0]]
    sensors.append({"token": f"sensor-{channel}", "channel": channel, "modality": "camera"})
    calibrations.append(
        {**own, "token": f"mount-{channel}", "sensor_token": f"sensor-{channel}", "camera_intrinsic": matrix}
    )
    ego = {row["token"]: row for row in poses}
    for image in [row for row in images if row["calibrated_sensor_token"] == own["token"]]:
        before, name = ego[image["ego_pose_token"]], image["filename"].replace("CAM_FRONT", channel)
        x, y, z = before["translation"]
        moved = {"token": f"{channel}-{before['token']}", "translation": [x + ahead_m, y, z]}
        poses.append({**before, **moved, "timestamp": image["timestamp"] + skew_us})
        changed = {"token": f"{channel}-{image['token']}", "filename": name, "timestamp": image["timestamp"] + skew_us}
        mount = {"calibrated_sensor_token": f"mount-{channel}", "ego_pose_token": moved["token"]}
        images.append({**image, **changed, **mount})
        if (root / image["filename"]).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / image["filename"], root / name)
    written = {"sensor": sensors, "calibrated_sensor": calibrations, "ego_pose": poses, "sample_data": images}
    for name, rows in written.items():
        (root / version / f"{name}.json").write_text(json.dumps(rows))
