"""HunyuanVideo and HunyuanVideo-1.5: joint attention, text after the video, each in a stream of its own.

HunyuanVideo's later blocks, of one stream, have no branch: their output layer mixes attention with the feed-forward.
"""

from merope.adapters.families.facts import Family

HUNYUAN_VIDEO = Family(transformer="HunyuanVideoTransformer3DModel", models="HunyuanVideo", attention="attn")
HUNYUAN_VIDEO_15 = Family(transformer="HunyuanVideo15Transformer3DModel", models="HunyuanVideo-1.5", attention="attn")
