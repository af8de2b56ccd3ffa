"""narrowcast as a quantization method of transformers.

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=NarrowcastConfig("int4"))
    model.save_pretrained(other)                             # rows as they are, the codec of each weight in config.json
    model = AutoModelForCausalLM.from_pretrained(other)      # the same bytes: nothing is quantized again

Importing this module registers the method under the name "narrowcast"; folders that `narrowcast quantize` wrote load, too.

While a float checkpoint loads, each weight is encoded as it arrives and its floats are let go, so that memory holds the
rows of the model and the floats of one weight. By transformers' habit the output head, weights tied to it, embeddings
and convolutions stay floats; a rule that names one of them decides otherwise. A weight that is not finite is refused.
`config.weights` lists what was encoded: from it, and from nothing else, an encoded folder is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast import codec as as_codec
from narrowcast.codecs import Codec
from narrowcast.codecs.rules import CodecLike, compile_rules
from narrowcast.errors import QuantizeError, SpecError, StateDictError
from narrowcast.nn import adopt, dequantize_, encodings
from narrowcast.nn.convert import finish, place
from narrowcast.nn.encoded import Encoded
from narrowcast.nn.slots import Weight, survey
from narrowcast.payload import Encoding, encode_rows

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils import logging
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        "narrowcast.integrations.transformers needs transformers 5 or later. Run: pip install 'narrowcast[hf]'"
    ) from error

METHOD = "narrowcast"
logger = logging.get_logger(__name__)


@register_quantization_config(METHOD)  # type: ignore[untyped-decorator]
class NarrowcastConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Which codec each weight of a transformers model gets.

    `rules` maps regular expressions, searched for in module names, to codecs or None: the first that matches decides, and
    `codec` where none does. `modules_to_not_convert` is transformers' own list of what to leave, before any rule.
    `weights` is filled in when a model has been quantized.
    """

    def __init__(
        self,
        codec: CodecLike = "int8",
        rules: Mapping[str, CodecLike | bool | None] | None = None,
        modules_to_not_convert: Iterable[str] | None = None,
        weights: Mapping[str, str] | None = None,
        **unknown: Any,
    ) -> None:
        given = unknown.pop("quant_method", METHOD)
        if unknown or given != METHOD:
            odd = ", ".join(unknown) or f"quant_method={given!r}"
            raise SpecError(
                f"NarrowcastConfig: {odd} is nothing it knows. It takes codec, rules, modules_to_not_convert and "
                "weights. A config.json with more comes from a later narrowcast: pip install --upgrade narrowcast."
            )
        self.quant_method = METHOD
        self.codec = as_codec(codec).spec
        self.rules = compile_rules(rules, None).config()
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.weights = {name: as_codec(spec).spec for name, spec in (weights or {}).items()}


@register_quantizer(METHOD)  # type: ignore[untyped-decorator]
class NarrowcastHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """What `from_pretrained` calls on its way."""

    requires_calibration = False
    quantization_config: NarrowcastConfig

    def __init__(self, quantization_config: NarrowcastConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.chosen: dict[str, tuple[Weight, Codec]] = {}
        """The weights to be encoded as they are loaded, by every key that they have."""

    # -- before: decide on the empty model -----------------------------------------------------------------------

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        if self.pre_quantized:
            adopt(model, self._stored(model))
        else:
            self.chosen = self._choose(model)

    def _choose(self, model: Any) -> dict[str, tuple[Weight, Codec]]:
        config = self.quantization_config
        left = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        left += [name for name, module in model.named_modules() if isinstance(module, _LEFT)]
        # Behind the user's rules, so that a rule that names one of these decides.
        habits = {f"^{re.escape(name)}$": None for name in left}
        rules = compile_rules({**config.rules, **habits}, config.codec)
        found = {}
        for weight in survey(model).weights:
            names = [name for slot in weight.slots for name in slot.known_as()]
            codec = rules.codec_for(*names)
            wanted = all(should_convert_module(name, config.modules_to_not_convert) for name in names)
            if codec is not None and wanted:
                found |= dict.fromkeys(weight.names(), (weight, codec))
        unused = [pattern for pattern in rules.unused if pattern in config.rules]
        if unused:
            logger.warning(f"NarrowcastConfig: no module has a name in which these rules are found: {unused}.")
        return found

    def _stored(self, model: Any) -> dict[str, Encoding]:
        """What the weights of an encoded folder are, by the model's own keys."""
        if not self.quantization_config.weights:
            raise StateDictError(
                'config.json: quantization_config has no "weights", which says which weights are encoded and how. It '
                "was edited, or written by something else. Save the model again with save_pretrained, or quantize it."
            )
        known = {key: weight for weight in survey(model).weights for key in weight.names()}
        found: dict[str, Encoding] = {}
        for key, name, spec in self._renamed(model, known):
            slot = known[key].slots[0] if key in known else None
            shape, dtype = (slot.shape(), slot.float_weight().dtype) if slot else (torch.Size(), torch.float32)
            encoding = Encoding(as_codec(spec), shape, dtype)
            if found.setdefault(key, encoding) != encoding:
                raise StateDictError(
                    f"config.json: {name!r} is {spec!r}, and another weight that transformers merges with it into "
                    f"{key!r} is {found[key].codec.spec!r}. Quantize them with one codec: a rule that matches both."
                )
        return found

    def _renamed(self, model: Any, known: Mapping[str, Weight]) -> Iterable[tuple[str, str, str]]:
        """Each name of `config.weights` as the key that the loader will give it, the name, and its codec."""
        mapping = get_model_conversion_mapping(model) or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        keys = model.state_dict()
        for name, spec in self.quantization_config.weights.items():
            key = name if name in known or name.endswith("weight") or f"{name}.weight" not in known else f"{name}.weight"
            if key not in known:
                key, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, keys)
            yield key, name, spec

    # -- during: encode each weight as it arrives ----------------------------------------------------------------

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.chosen

    def get_quantize_ops(self) -> ConversionOps:
        return Encode(self)

    @property
    def quantized_element_size(self) -> float:
        return as_codec(self.quantization_config.codec).bits_per_element() / 8

    # -- after: look at what was loaded --------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        finish(model)
        for name, module in model.named_modules():
            if isinstance(module, Encoded):
                _check_rows(name, module)
        self.chosen = {}
        self.quantization_config.weights = {name: encoding.codec.spec for name, encoding in encodings(model).items()}
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        dequantize_(model)
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        # Adapters are: gradients pass through encoded layers. The rows themselves are not trained.
        return True

    @property
    def is_compileable(self) -> bool:
        return True


_LEFT = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Encode(ConversionOps):  # type: ignore[misc]
    """The step of the loader that turns one float weight into rows."""

    def __init__(self, quantizer: NarrowcastHfQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: Mapping[str, Any], full_layer_name: str, **kwargs: Any) -> dict[str, Tensor]:
        (value,) = input_dict.values()
        floats = value[0] if isinstance(value, list) else value
        weight, codec = self.quantizer.chosen[full_layer_name]
        slot = weight.slots[0]
        if floats.device.type != "meta" and not all(extreme.isfinite() for extreme in torch.aminmax(floats)):
            raise QuantizeError(
                f"{full_layer_name}: the weight holds an infinity or a NaN, and a block that does decodes to NaN "
                "throughout. Usually a training run diverged, or fp16 overflowed. Mend the checkpoint, or leave the "
                f'weight as it is with rules={{"{slot.names[0]}": None}}.'
            )
        floats = floats.t().contiguous() if slot.transposed else floats
        rows = encode_rows(floats, codec, lead=slot.lead)
        place(weight, rows)
        return {full_layer_name: slot.float_weight()}


def _check_rows(name: str, module: Encoded) -> None:
    """The loader puts any tensor in the place of any other once a model is quantized."""
    for parameter, held in module._held.items():
        rows = module._parameters[parameter]
        assert rows is not None
        lead = rows.dim() - 1
        width = held.codec.row_bytes(held.shape[lead:].numel())
        if rows.dtype != torch.uint8 or rows.shape != (*held.shape[:lead], width):
            raise StateDictError(
                f"{name}.{parameter}: expected rows of codec {held.codec.spec!r} for a weight of {list(held.shape)}, found "
                f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}. config.json and the files are of different "
                "saves; or the weight was encoded without its model as [in, out], as GPT-2 keeps it: quantize that "
                "model with from_pretrained(..., quantization_config=NarrowcastConfig(...)) instead."
            )
