// Tells if Python's mglu_ops has already registered the operators in this process.
//
// torch's stable ABI cannot tell if a schema exists, and defining a schema twice is an error, which torch 2.11 also
// logs. Therefore the function asks the process's Python interpreter, if there is one, through Python's stable ABI.
#pragma once

#include <dlfcn.h>

namespace mglu {

inline bool python_has_operators() {
    const auto find = [](const char* name) { return dlsym(RTLD_DEFAULT, name); };
    const auto is_initialized = reinterpret_cast<int (*)()>(find("Py_IsInitialized"));
    const auto ensure = reinterpret_cast<int (*)()>(find("PyGILState_Ensure"));
    const auto release = reinterpret_cast<void (*)(int)>(find("PyGILState_Release"));
    const auto modules = reinterpret_cast<void* (*)()>(find("PyImport_GetModuleDict"));
    const auto get = reinterpret_cast<void* (*)(void*, const char*)>(find("PyDict_GetItemString"));
    if (!is_initialized || !ensure || !release || !modules || !get || !is_initialized()) return false;
    const int state = ensure();  // Python may have released the GIL while it loads a library
    const bool found = get(modules(), "mglu_ops.ops") != nullptr;
    release(state);
    return found;
}

}  // namespace mglu
