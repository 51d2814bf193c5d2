"""The converter by the names that programs know; it lives in ``backpack.converter``."""

from backpack.converter import convert, editing, inplace, known, recurrent
from backpack.converter.convert import convert_module_to_backpack
from backpack.converter.tracer import BackpackTracer

__all__ = ["BackpackTracer", "convert_module_to_backpack"]

_change_node_to_module = editing.change_node_to_module
_check_backpack_compatible = convert.check_backpack_compatible
_get_free_name = editing.get_free_name
_make_rnn_backpack = recurrent.make_rnn_backpack
_rnn_hyperparams = recurrent.rnn_hyperparams
_transform_add_to_sum_module = known.transform_add_to_sum_module
_transform_flatten_to_module = known.transform_flatten_to_module
_transform_get_item_to_module = known.transform_get_item_to_module
_transform_inplace_to_normal = inplace.transform_inplace_to_normal
_transform_lstm_rnn = recurrent.transform_lstm_rnn
_transform_mul_to_scale_module = known.transform_mul_to_scale_module
_transform_permute_to_module = known.transform_permute_to_module
_transform_remove_duplicates = convert.transform_remove_duplicates
_transform_transpose_to_module = known.transform_transpose_to_module
