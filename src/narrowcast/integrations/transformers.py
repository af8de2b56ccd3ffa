"""narrowcast as a quantization method of transformers.

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=NarrowcastConfig("int4"))
    model.save_pretrained(other)                             # rows, and the codec of each weight in config.json
    model = AutoModelForCausalLM.from_pretrained(other)      # the same bytes: nothing is quantized again

Importing this module registers the method under the name "narrowcast". Folders of `narrowcast quantize` load, too. A
weight that is encoded there and that the model has no encoded form for is decoded.

While a float checkpoint loads, each weight is encoded as it arrives and its floats are freed. As usual in transformers,
the output head, weights tied to it, embeddings and convolutions stay floats, unless a rule names them. A weight that is
not finite is refused. `config.weights` lists the encoded weights: it alone decides how an encoded folder is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast import codec as as_codec
from narrowcast.codecs import Codec
from narrowcast.codecs.payload import Encoding, encode_rows
from narrowcast.codecs.registry import codec_in_file
from narrowcast.codecs.rules import CodecLike, compile_rules
from narrowcast.codecs.sensitivity import is_finite
from narrowcast.errors import QuantizeError, SpecError, StateDictError
from narrowcast.nn import adopt, dequantize_, encodings
from narrowcast.nn.encodings import drop_codecs, stored_state
from narrowcast.nn.modules.base import Encoded, become, encoded_parameters, float_dtype_of, hold, set_float_dtype
from narrowcast.nn.modules.first_dtype import show_dtype
from narrowcast.nn.quantize import finish, place
from narrowcast.nn.survey import Weight, survey

try:
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils import logging
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        "narrowcast.integrations.transformers needs transformers 5 or later. Run: pip install 'narrowcast[hf]'"
    ) from error

from narrowcast.integrations.loaded_rows import check_floats, check_rows, decode
from narrowcast.integrations.model_names import keys_of

METHOD = "narrowcast"
_FLOAT_MODULES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
logger = logging.get_logger(__name__)


@register_quantization_config(METHOD)
class NarrowcastConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Which codec each weight of a transformers model gets.

    `rules` maps regular expressions, searched for in module names, to codecs or None. The first that matches decides;
    where none does, `codec` (None leaves the weight alone). `modules_to_not_convert` is transformers' own list of
    modules to leave, before any rule. `weights` is filled in when a model has been quantized.
    """

    def __init__(
        self,
        codec: CodecLike | None = "int8",
        rules: Mapping[str, CodecLike | bool | None] | None = None,
        modules_to_not_convert: Iterable[str] | None = None,
        weights: Mapping[str, str] | None = None,
        **unknown: Any,
    ) -> None:
        given = unknown.pop("quant_method", METHOD)
        if unknown or given != METHOD:
            odd = ", ".join(unknown) or f"quant_method={given!r}"
            raise SpecError(
                f"NarrowcastConfig: {odd} is unknown. It takes codec, rules, modules_to_not_convert and weights. A "
                "config.json with other entries comes from a later narrowcast: pip install --upgrade narrowcast."
            )
        self.quant_method = METHOD
        self.codec = None if codec is None else as_codec(codec).spec
        self.rules = compile_rules(rules, None).config()
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.weights = {name: codec_in_file(spec).spec for name, spec in (weights or {}).items()}


@register_quantizer(METHOD)
class NarrowcastHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """The methods that `from_pretrained` and `save_pretrained` call."""

    requires_calibration = False
    quantization_config: NarrowcastConfig

    def __init__(self, quantization_config: NarrowcastConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.chosen: dict[str, tuple[Weight, Codec]] = {}
        """The weights to encode while they are loaded, under all their keys."""
        self.floats: dict[str, Encoding] = {}
        """Rows to decode after loading, for modules that cannot hold them."""
        self.shapes: dict[str, torch.Size] = {}
        """Of weights that files may hold as rows: their shapes as floats."""
        self.quiet: Any = None

    # -- before loading: choose codecs on the empty model --------------------------------------------------------

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if self.pre_quantized:
            keys = {key for weight in survey(model).weights for key in weight.names()}
            self.shapes = {key: value.shape for key, value in model.state_dict().items() if key in keys}
            adopt(model, self._stored_encodings(model))
            # config.json describes the rows. The files do not, and the loader must not report that as missing.
            self.quiet = model.register_state_dict_post_hook(drop_codecs)
        else:
            self.chosen = self._choose_codecs(model)

    def _choose_codecs(self, model: Any) -> dict[str, tuple[Weight, Codec]]:
        config = self.quantization_config
        left = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        left += [name for name, module in model.named_modules() if isinstance(module, _FLOAT_MODULES)]
        # After the user's rules, so that a rule that names one of these decides.
        usual = {f"^{re.escape(name)}$": None for name in left}
        rules = compile_rules({**config.rules, **usual}, config.codec)
        chosen: dict[str, tuple[Weight, Codec]] = {}
        for weight in _weights(model):
            names = [name for slot in weight.slots for name in slot.known_as()]
            codec = rules.codec_for(*names)
            wanted = all(should_convert_module(name, config.modules_to_not_convert) for name in names)
            if codec is not None and wanted:
                chosen |= dict.fromkeys(weight.names(), (weight, codec))
        unused = [pattern for pattern in rules.unused if pattern in config.rules]
        if unused:
            logger.warning(f"NarrowcastConfig: these rules match no module: {unused}.")
        return chosen

    def _stored_encodings(self, model: Any) -> dict[str, Encoding]:
        """The encodings of the weights of an encoded folder, by the model's own keys."""
        if not self.quantization_config.weights:
            raise StateDictError(
                'config.json: quantization_config has no "weights", which lists the encoded weights and their codecs. '
                "It was edited, or another program wrote it. Save the model again with save_pretrained, or quantize it."
            )
        keys = model.state_dict()
        known = {key: weight for weight in survey(model).weights for key in weight.names()}
        rows: dict[str, Encoding] = {}
        weights = self.quantization_config.weights
        # transformers reports a weight that this model does not have as unexpected.
        for name, key in keys_of(model, weights, keys).items():
            spec = weights[name]
            shape = known[key].slots[0].shape() if key in known else keys[key].shape
            encoding = Encoding(as_codec(spec), shape, keys[key].dtype)
            into = rows if key in known else self.floats
            if into.setdefault(key, encoding) != encoding:
                raise StateDictError(
                    f"config.json: {name!r} is {spec!r}, and another weight that transformers merges with it into "
                    f"{key!r} is {into[key].codec.spec!r}. Quantize them with one codec: a rule that matches both."
                )
        # Files hold a tied weight once. All modules that it is tied to must hold rows.
        for weight in _weights(model):
            stored = [rows[key] for key in weight.names() if key in rows]
            rows |= dict.fromkeys(weight.names(), stored[0]) if stored else {}
        return rows

    # -- while loading: encode each weight as it arrives ---------------------------------------------------------

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        # With files of rows it means: do not compare shapes. They are compared after loading, rows and floats apart.
        return param_name in (self.shapes.keys() | self.floats.keys() if self.pre_quantized else self.chosen)

    def get_quantize_ops(self) -> ConversionOps:
        return Encode(self)

    @property
    def quantized_element_size(self) -> float | None:
        codec = None if self.pre_quantized else self.quantization_config.codec
        return None if codec is None else as_codec(codec).bits_per_element() / 8

    # -- after loading: check the rows ---------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for weight, codec in self.chosen.values():
            _complete(weight, codec)
        for key, encoding in self.floats.items():
            decode(model, key, encoding)
        finish(model)
        if self.quiet is not None:
            self.quiet.remove()
        for name, module in model.named_modules():
            check_rows(name, module)
        check_floats(model, self.shapes)
        show_dtype(model)
        self.chosen, self.floats, self.shapes = {}, {}, {}
        self.quantization_config.weights = {name: encoding.codec.spec for name, encoding in encodings(model).items()}
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a config that was saved has a string
        for module in model.modules():
            if isinstance(module, Encoded) and wanted is not None:
                set_float_dtype(module, wanted)
        return dequantize_(model)

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        return stored_state(model), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        # Gradients pass through encoded layers to adapters. The rows themselves are not trained.
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class Encode(ConversionOps):  # type: ignore[misc]
    """The step of the loader that turns one float weight into rows."""

    def __init__(self, quantizer: NarrowcastHfQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: Mapping[str, Any], full_layer_name: str, **kwargs: Any) -> dict[str, Tensor]:
        (value,) = input_dict.values()
        floats = value[0] if isinstance(value, list) else value
        weight, codec = self.quantizer.chosen[full_layer_name]
        # Only this slot, not those tied to it: where the file has a weight for each, transformers does not tie them.
        slot = next(slot for slot in weight.slots if full_layer_name in Weight([slot]).names())
        if floats.device.type != "meta" and not is_finite(floats):
            raise QuantizeError(
                f"{full_layer_name}: holds an infinity or a NaN, and every block that holds one decodes to NaN. The "
                "usual cause is a training that diverged, or an overflow in fp16. Repair the checkpoint, or leave the "
                f'weight out with rules={{"{slot.names[0]}": None}}.'
            )
        floats = floats.t().contiguous() if slot.transposed else floats
        place(Weight([slot]), encode_rows(floats, codec, lead=slot.lead))
        return {full_layer_name: slot.float_weight()}


def _weights(model: Any) -> list[Weight]:
    """The weights of an empty model, tied ones as one. transformers ties Parameters only after it has loaded them."""
    by_key = {key: weight for weight in survey(model).weights for key in weight.names()}
    for target, source in model.all_tied_weights_keys.items():
        one, other = by_key.get(target), by_key.get(source)
        if one is None or other is None:
            # The other one cannot hold rows, so neither is encoded.
            for key in (one or other or Weight([])).names():
                del by_key[key]
        elif one is not other:
            merged = Weight([*one.slots, *other.slots])
            by_key |= dict.fromkeys(merged.names(), merged)
    return list({id(weight): weight for weight in by_key.values()}.values())


def _complete(weight: Weight, codec: Codec) -> None:
    """Give modules that got their rows by a tie the class that holds rows."""
    first = next((slot.module for slot in weight.slots if isinstance(slot.module, Encoded)), None)
    for slot in weight.slots:
        rows = slot.float_weight()
        if first is not None and not isinstance(slot.module, Encoded) and rows.dtype == torch.uint8:
            become(slot.module, slot.target, float_dtype_of(first))
            hold(slot.module, slot.parameter, rows, next(iter(encoded_parameters(first).values())))
