"""What Numba's compiler does with our functions: parts of kernels are only lowered, kernels are optimised once.

Left alone, Numba optimises every function and makes machine code of it, with two wrappers for callers outside, before
it copies the function into its callers, where all is done again. That was more than half of a kernel's time.
"""

from typing import Any

import llvmlite.binding as llvm
from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering


class _KernelCode(JITCodeLibrary):
    """Code that is optimised once, as a whole."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        # Parts of equal names would be merged with those of other code in the process, which may be of another process
        # (from the cache on disk) or call them with other arguments. LLVM's linker also merges names that are only
        # internal: it takes a function of Numba's to be one that this module optimised for its own callers.
        for function in self._final_module.functions:
            if function.linkage == llvm.Linkage.linkonce_odr and not function.is_declaration:
                function.linkage = llvm.Linkage.private
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.slp_vectorization = False
        builder = llvm.create_pass_builder(self._codegen._tm, options)
        manager = builder.getModulePassManager()
        if hasattr(manager, "add_refprune_pass"):  # from llvmlite 0.45 on
            manager.add_refprune_pass()
        manager.run(self._final_module, builder)


class _PartCode(_KernelCode):
    """Code that exists to be linked into its callers."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class KernelCompiler(Compiler):
    """Numba's compiler for functions that Python calls."""

    code: type[JITCodeLibrary] = _KernelCode

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        super().__init__(typing, target, library or self.code(target.codegen(), "kernel"), *rest)
        self.state.library.enable_object_caching()


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):
    """Hands the code to callers without an executable."""

    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        flags = state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        super().run_pass(state)
        lowered, library = state["cr"], state.library
        name = lowered.fndesc.qualname.split(".")[-1]
        entry = _dynfunc.make_function(lowered.fndesc.lookup_module(), name, name, 0, lowered.env, (library,))
        state.targetctx.insert_user_function(entry, lowered.fndesc, [library])
        state["cr"] = lowered._replace(cfunc=entry)
        return True


class PartCompiler(KernelCompiler):
    """Numba's compiler for functions that only kernels call."""

    code = _PartCode

    def define_pipelines(self) -> list[PassManager]:
        """Replace the last pass but one of Numba's own."""
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [(_PartLowering if step is NativeLowering else step, name) for step, name in manager.passes]
        manager.finalize()
        return [manager]
