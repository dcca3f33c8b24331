"""Stand-ins for packages that SGLang imports and never calls on a CPU.

Python imports this file at start where its folder is on ``PYTHONPATH``, also in processes that
SGLang starts. A package that is installed wins.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = ("sgl_kernel", "torchvision", "soundfile")
MODULES = ("sglang.jit_kernel.dsa.cutedsl_paged_mqa_logits",)


class _Named(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(ModuleType):
    __version__ = "0.28.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            return ModuleSpec(name, _Finder, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return _Stub(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.append(_Finder)
# in CuTe's Python, which no CPU has
for name in MODULES:
    sys.modules[name] = _Stub(name)
