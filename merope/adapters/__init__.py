"""Camera control for pretrained video transformers: the only place that imports diffusers."""
