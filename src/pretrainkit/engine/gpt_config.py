"""NeMo's config class for models that none of its own classes computes: features of layers, other rotary scalings.

The context of a checkpoint names it, so NeMo loads such a checkpoint where this package is installed, and fails where
it isn't, instead of computing something else.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from pretrainkit.config.layer_features import LayerFeatures
from pretrainkit.config.schema import RopeScaling
from pretrainkit.engine.nemo import llm
from pretrainkit.megatron.features import config_fields, finish_model
from pretrainkit.megatron.layer_spec import torch_layer_spec


@dataclass
class LayerFeaturesConfig(llm.GPTConfig):
    """A model with features of layers, as text since a context holds plain values."""

    position_embedding_type: str = "rope"
    features: str = ""
    """LayerFeatures.to_json."""
    rope_scaling: str = ""
    """The fields of RopeScaling as JSON; empty for none."""

    def __post_init__(self) -> None:
        for name, value in config_fields(self._features, self.num_layers).items():
            setattr(self, name, value)
        if self.features or self.rope_scaling:
            self.transformer_layer_spec = functools.partial(
                torch_layer_spec, features=self._features, rope_scaling=self._rope_scaling
            )
        super().__post_init__()

    @property
    def _features(self) -> LayerFeatures:
        return LayerFeatures.from_json(self.features)

    @property
    def _rope_scaling(self) -> RopeScaling | None:
        return RopeScaling(**json.loads(self.rope_scaling)) if self.rope_scaling else None

    def configure_model(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's module of a pipeline stage."""
        model = super().configure_model(*args, **kwargs)
        return finish_model(
            model, rope_theta=self.rotary_base, rope_scaling=self._rope_scaling, features=self._features
        )
