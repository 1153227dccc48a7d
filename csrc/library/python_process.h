// Whether this library was loaded into a Python process whose mglu_ops has registered the operators already.
//
// torch's stable ABI cannot be asked whether a schema exists: only defining it twice tells, by an error that torch 2.11
// writes to the log. So Python is asked, through its own stable ABI, if there is a Python.
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
    const int state = ensure();  // whoever loads a library may have let go of the interpreter for that time
    const bool found = get(modules(), "mglu_ops.ops") != nullptr;
    release(state);
    return found;
}

}  // namespace mglu
