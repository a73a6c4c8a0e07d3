"""Camera control for pretrained video transformers."""
