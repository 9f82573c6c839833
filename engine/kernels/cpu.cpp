#include <Python.h>
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "cpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
extern "C" PyMODINIT_FUNC JOIN(PyInit_, KVPILOT_MODULE)(void) { return PyModule_Create(&def); }
