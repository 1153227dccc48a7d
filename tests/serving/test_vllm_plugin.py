"""The plugin's registrations and warnings, with a fake vLLM. test_vllm_models.py uses the real vLLM."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

import mglu_ops
from mglu_ops.vllm import register
from mglu_ops.vllm.plugin import ARCHITECTURES
from tests.support.commands import python


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The models and quantization methods that are registered with a fake vLLM."""
    found: dict[str, str] = {}
    stand_ins = {
        "vllm": {"ModelRegistry": SimpleNamespace(register_model=found.__setitem__)},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.quantization": {
            "register_quantization_config": lambda method: partial(found.__setitem__, method)
        },
        "mglu_ops.vllm.quantization": {"METHOD": "mglu", "MGLUConfig": "MGLUConfig"},
    }
    for name, contents in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_each_architecture_is_a_name_that_vllm_imports_later(registered, monkeypatch):
    monkeypatch.setitem(sys.modules, "mglu_ops.transformers", ModuleType("mglu_ops.transformers"))
    monkeypatch.delitem(sys.modules, "mglu_ops.vllm.models", raising=False)  # another test may have imported it
    for _ in range(2):  # vLLM may call a plugin repeatedly
        register()
    assert registered.pop("mglu") == "MGLUConfig"
    assert registered == {name: f"mglu_ops.vllm.models:{name}" for name in ARCHITECTURES}
    assert "mglu_ops.vllm.models" not in sys.modules


@pytest.mark.parametrize(("value", "is_on"), [(None, False), ("0", False), ("1", True)])
def test_vllms_batch_invariant_mode_is_the_one_of_this_package(value, is_on, registered, monkeypatch):
    monkeypatch.setitem(sys.modules, "mglu_ops.transformers", ModuleType("mglu_ops.transformers"))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    with mglu_ops.set_batch_invariant_mode(False):  # restores the mode
        register()
        assert mglu_ops.is_batch_invariant_mode_enabled() == is_on
    assert "MGLUConfig" in registered.values()


def test_registering_does_not_import_inductor() -> None:
    """It takes seconds, in each process of vLLM, some of which do not compile anything."""
    code = "import sys; from mglu_ops.vllm import plugin; plugin.enable_fusion_from_environment(); "
    assert python("-c", code + "print('torch._inductor.compile_fx' in sys.modules)") == "False\n"


def test_without_transformers_other_models_of_vllm_are_unaffected(registered, monkeypatch):
    monkeypatch.setitem(sys.modules, "mglu_ops.transformers", None)
    with pytest.warns(UserWarning, match=r"vLLM cannot load MGLU models: .*mglu_ops\.transformers"):
        register()
    assert not registered


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"mglu_ops\.vllm is a plugin of vLLM: pip install vllm"):
        register()
