"""The rows of both benchmarks in the order in which they are to be measured, and the titles of their tables."""

Groups = dict[str, tuple[str, ...]]

ABLATION = (
    "ablation-rotation-only",
    "ablation-translation-only",
    "ablation-disparity-only",
    "ablation-rotation-translation",
    "ablation-disparity-rotation",
    "ablation-disparity-translation",
)

OTHER_WAYS = (
    "ucpe-clamped",
    "recammaster",
    "motionctrl",
    "modulation",
    "camco",
    "camco-all-frames",
    "raype",
    "roce",
)

WORLD: Groups = {
    "Encodings": ("none", "gta", "prope", "ucpe", "raynova", "rayrope", "urope", "cameractrl", "merope"),
    "Components (ablation)": ABLATION,
    "Anchor frames, frequencies, injection": ("transport", "single-frequency", "every-block", "rerope"),
    "Mixed lenses": (
        "mixed-lenses-gta",
        "mixed-lenses-prope",
        "mixed-lenses-ucpe",
        "mixed-lenses-raynova",
        "mixed-lenses-merope",
    ),
    "Values turned or not": ("logits-only", "raynova-values"),
    "Angular resolution": ("raynova-coarse", "fine-native", "direction-phases"),
    "Four times as long": ("long-raynova", "long-merope"),
    "Added to a trained model": ("after-none-gta", "after-none-raynova", "after-none-merope"),
    "Other ways to tell the camera": OTHER_WAYS,
}
"""Every row of configs/world."""

MINIATURE: Groups = {
    "Encodings": (
        *("none", "gta", "prope", "ucpe", "raynova", "rayrope", "urope", "cameractrl", "merope"),
        "direction-phases",
    ),
    "The branch alone is trained": (
        *("branch-gta", "branch-ucpe", "branch-raynova", "branch-merope", "branch-direction-phases"),
    ),
    "Raw metres": ("gta-raw", "ucpe-raw"),
    "Components (ablation)": ABLATION,
    "Anchor frames, frequencies, injection": (
        *("transport", "anchor-phases", "single-frequency", "every-block", "peak-blocks", "rerope"),
    ),
    "Width of the branch": ("compression-2", "compression-3", "compression-6"),
    "Retrieved history": ("history-none", "history-ca", "history-sa"),
    "Mixed lenses": (
        *("mixed-lenses-ucpe", "mixed-lenses-raynova", "mixed-lenses-merope", "mixed-lenses-direction-phases"),
    ),
    "Other ways to tell the camera": OTHER_WAYS,
}
"""Every row of configs/miniature, but base.toml, which all of them begin with."""

BENCHMARKS: dict[str, Groups] = {"world": WORLD, "miniature": MINIATURE}
"""By the folder of their configs."""
