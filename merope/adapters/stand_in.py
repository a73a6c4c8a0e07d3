"""A processor of diffusers that stands in the place of a model's own."""

from typing import Any

from merope.errors import invalid


class StandIn:
    """Hands diffusers' choice of a backend on to the processor behind it (`base`). It cannot be split over ranks."""

    base: Any
    reason: str  # why it is here
    way_back: str  # to the model's own processor

    @property
    def _attention_backend(self) -> Any:
        return self.base._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.base._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return getattr(self.base, "_parallel_config", None)  # some models' own ones do not know of it

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        if config is not None:
            expected, fix = f"None {self.reason}: plans are not split over ranks", f"shard samples, or {self.way_back}"
            raise invalid("parallel_config", expected, config, fix)
