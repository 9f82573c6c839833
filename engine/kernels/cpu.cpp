// The Python module: unpacks integers (addresses, counts, flags) and buffers, and calls the kernels.
// Shapes, dtypes and contiguity are checked in cpu.py, the only caller.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention.h"
#include "convert.h"
#include "elementwise.h"
#include "prefill.h"

namespace {

// Arguments in order; arrays come as objects with the buffer protocol and stay alive until the end of the call.
class Arguments {
public:
    Arguments(PyObject* const* args) : next_(args) {}
    ~Arguments() {
        for (int i = 0; i < num_buffers_; i++) PyBuffer_Release(&buffers_[i]);
    }
    int64_t integer() { return PyLong_AsLongLong(*next_++); }
    int count() { return int(integer()); }
    float real() { return float(PyFloat_AsDouble(*next_++)); }
    template <class T> T* address() { return (T*)PyLong_AsVoidPtr(*next_++); }
    template <class T> T* array() {
        if (PyObject_GetBuffer(*next_++, &buffers_[num_buffers_], PyBUF_C_CONTIGUOUS) != 0) return nullptr;
        return (T*)buffers_[num_buffers_++].buf;
    }
    kv::Layout layout() {
        const kv::Layout* layout = array<kv::Layout>();
        return layout ? *layout : kv::Layout{};
    }
    bool failed() const { return PyErr_Occurred() != nullptr; }

private:
    PyObject* const* next_;
    Py_buffer buffers_[6];
    int num_buffers_ = 0;
};

template <class Body> void with_dtype(bool is_bf16, Body body) {
    if (is_bf16) body(kv::bf16{});
    else body(float{});
}

PyObject* rms_norm(PyObject*, PyObject* const* args, Py_ssize_t) {
    Arguments a(args);
    auto x = a.address<void>();
    const bool x_bf16 = a.integer();
    auto weight = a.address<void>(), out = a.address<void>();
    const bool out_bf16 = a.integer();
    const int64_t tokens = a.integer(), hidden = a.integer();
    const float eps = a.real();
    const int threads = a.count();
    if (a.failed()) return nullptr;
    with_dtype(x_bf16, [&](auto x_type) {
        with_dtype(out_bf16, [&](auto out_type) {
            using X = decltype(x_type);
            using Y = decltype(out_type);
            kv::rms_norm((const X*)x, (const Y*)weight, (Y*)out, tokens, hidden, eps, threads);
        });
    });
    Py_RETURN_NONE;
}

PyObject* add_to(PyObject*, PyObject* const* args, Py_ssize_t) {
    Arguments a(args);
    auto x = a.address<void>();
    const bool x_bf16 = a.integer();
    auto residual = a.address<void>();
    const bool residual_bf16 = a.integer();
    const int64_t count = a.integer();
    if (a.failed()) return nullptr;
    with_dtype(x_bf16, [&](auto x_type) {
        with_dtype(residual_bf16, [&](auto residual_type) {
            kv::add_to((const decltype(x_type)*)x, (decltype(residual_type)*)residual, count);
        });
    });
    Py_RETURN_NONE;
}

PyObject* silu_mul(PyObject*, PyObject* const* args, Py_ssize_t) {
    Arguments a(args);
    auto gate_up = a.address<void>(), out = a.address<void>();
    const bool is_bf16 = a.integer();
    const int64_t tokens = a.integer(), inner = a.integer();
    const int threads = a.count();
    if (a.failed()) return nullptr;
    with_dtype(is_bf16, [&](auto type) {
        kv::silu_mul((const decltype(type)*)gate_up, (decltype(type)*)out, tokens, inner, threads);
    });
    Py_RETURN_NONE;
}

PyObject* rope_rotate_write(PyObject*, PyObject* const* args, Py_ssize_t) {
    Arguments a(args);
    const kv::Layout layout = a.layout();
    const int64_t layer = a.integer(), num_heads = a.integer(), num_tokens = a.integer(), threads = a.integer();
    const bool is_rotated = a.integer();
    auto pool = a.address<uint8_t>();
    auto qkv = a.address<void>(), q = a.address<void>();
    const bool is_bf16 = a.integer();
    auto positions = a.array<int64_t>(), places = a.array<int64_t>();
    auto cos = a.address<float>(), sin = a.address<float>();
    if (a.failed()) return nullptr;
    with_dtype(is_bf16, [&](auto type) {
        with_dtype(layout.kinds[0] == kv::kBF16, [&](auto stored_type) {
            using T = decltype(type);
            using S = decltype(stored_type);
            kv::WriteCall<T, S>{layout, layer,       num_heads, num_tokens, threads, is_rotated, pool,
                                (const T*)qkv, (T*)q, positions, places,     cos,     sin}
                .run();
        });
    });
    Py_RETURN_NONE;
}

PyObject* decode_attention(PyObject*, PyObject* const* args, Py_ssize_t) {
    Arguments a(args);
    const kv::Layout layout = a.layout();
    const int64_t layer = a.integer(), num_heads = a.integer(), num_sequences = a.integer(), threads = a.integer();
    auto pool = a.address<uint8_t>();
    auto q = a.address<void>(), out = a.address<void>();
    const bool is_bf16 = a.integer();
    auto pages = a.array<kv::PageCells>();
    auto indptr = a.array<int64_t>(), num_tokens = a.array<int64_t>();
    if (a.failed()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    with_dtype(is_bf16, [&](auto type) {
        using T = decltype(type);
        kv::DecodeCall<T>{layout,   layer, num_heads, num_sequences, threads, pool,
                          (const T*)q, (T*)out, pages, indptr, num_tokens}
            .run();
    });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* gather_pages(PyObject*, PyObject* const* args, Py_ssize_t) {
    Arguments a(args);
    const kv::Layout layout = a.layout();
    const int64_t layer = a.integer(), num_tokens = a.integer(), threads = a.integer();
    auto pool = a.address<uint8_t>();
    auto pages = a.array<kv::PageCells>();
    auto k = a.address<void>(), v = a.address<void>();
    const bool is_bf16 = a.integer();
    if (a.failed()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    with_dtype(is_bf16, [&](auto type) {
        using T = decltype(type);
        kv::GatherCall<T>{layout, layer, num_tokens, threads, pool, pages, (T*)k, (T*)v}.run();
    });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* has_bf16_prefill(PyObject*, PyObject* const*, Py_ssize_t) {
#if defined(KV_BF16_DOT)
    return PyBool_FromLong(__builtin_cpu_supports("avx512bf16"));
#else
    Py_RETURN_FALSE;
#endif
}

#if defined(KV_BF16_DOT)
PyObject* prefill_attention(PyObject*, PyObject* const* args, Py_ssize_t) {
    Arguments a(args);
    const kv::Layout layout = a.layout();
    const int64_t layer = a.integer(), num_heads = a.integer(), num_new = a.integer(), start = a.integer();
    const int64_t threads = a.integer();
    auto pool = a.address<uint8_t>();
    auto q = a.address<kv::bf16>(), out = a.address<kv::bf16>();
    auto pages = a.array<kv::PageCells>();
    if (a.failed()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kv::PrefillCall{layout, layer, num_heads, num_new, start, threads, pool, q, out, pages}.run();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
#endif

PyObject* convert_page(PyObject*, PyObject* const* args, Py_ssize_t) {
    Arguments a(args);
    const kv::Layout layout = a.layout();
    auto pool = a.address<uint8_t>();
    kv::PageCells from{}, to{};
    for (kv::PageCells* cells : {&from, &to}) {
        cells->level = a.integer();
        cells->payload = a.integer();
        cells->scales = a.integer();
    }
    const int threads = a.count();
    if (a.failed()) return nullptr;
    bool is_fine;
    Py_BEGIN_ALLOW_THREADS;
    is_fine = kv::convert_page(layout, pool, from, to, threads);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(is_fine);
}

#define KV_METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, nullptr}
PyMethodDef methods[] = {KV_METHOD(rms_norm),         KV_METHOD(add_to),       KV_METHOD(silu_mul),
                         KV_METHOD(rope_rotate_write), KV_METHOD(decode_attention), KV_METHOD(gather_pages),
                         KV_METHOD(convert_page),     KV_METHOD(has_bf16_prefill),
#if defined(KV_BF16_DOT)
                         KV_METHOD(prefill_attention),
#endif
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "cpu", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

#define KV_JOIN2(a, b) a##b
#define KV_JOIN(a, b) KV_JOIN2(a, b)
extern "C" PyMODINIT_FUNC KV_JOIN(PyInit_, KVPILOT_MODULE)(void) { return PyModule_Create(&module); }
