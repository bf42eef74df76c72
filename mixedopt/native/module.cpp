// What eager training asks of the host for every layer, kernel and parameter, without the interpreter.

#include "kernel.h"
#include "linear.h"
#include "losses.h"
#include "norms.h"
#include "walks.h"

namespace {

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef METHODS[] = {
    {"kernel", mixedopt::kernel, METH_VARARGS, nullptr},
    {"launch", fast(mixedopt::launch), METH_FASTCALL, nullptr},
    {"ready", fast(mixedopt::ready), METH_FASTCALL, nullptr},
    {"relaunch", fast(mixedopt::relaunch), METH_FASTCALL, nullptr},
    {"rows", mixedopt::new_rows, METH_NOARGS, nullptr},
    {"add_rows", mixedopt::add_rows, METH_VARARGS, nullptr},
    {"add_rows_backward", mixedopt::add_rows_backward, METH_VARARGS, nullptr},
    {"row_norm", fast(mixedopt::row_norm), METH_FASTCALL, nullptr},
    {"losses", mixedopt::new_losses, METH_NOARGS, nullptr},
    {"add_loss", mixedopt::add_loss, METH_VARARGS, nullptr},
    {"cross_entropy", fast(mixedopt::cross_entropy), METH_FASTCALL, nullptr},
    {"linear", fast(mixedopt::linear), METH_FASTCALL, nullptr},
    {"pointers", mixedopt::pointers, METH_O, nullptr},
    {"versions", mixedopt::versions, METH_O, nullptr},
    {"stand", fast(mixedopt::stand), METH_FASTCALL, nullptr},
    {"gradients", mixedopt::gradients, METH_O, nullptr},
    {"take", mixedopt::take, METH_O, nullptr},
    {"bump", fast(mixedopt::bump), METH_FASTCALL, nullptr},
    {"held", mixedopt::held, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "mixedopt_native", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_mixedopt_native() { return PyModule_Create(&MODULE); }
