"""The kernels of a step on a CPU, as C++.

Three functions, each of (how many pieces, a number, pointers): ``measure``
looks at every gradient where it lies, ``plan`` decides and works out the
numbers of every slot, ``update`` applies the rule in one pass. They do what the
kernels of a GPU do (``gather_kernels``, ``step_kernels``), on the same tables.
"""

from __future__ import annotations

import torch

from mixedopt.dialects import CXX
from mixedopt.forms import OWN, Form, lines_of_judgement, lines_of_numbers, lines_of_update
from mixedopt.judgement import NEXT_SCALE, Rules, Standing
from mixedopt.numbering import PIECE

LANES = 32  # values that are worked on at once, in registers
READ = 1024  # values whose squares are summed in fp32, in so many lanes
SAFE = 32  # a largest value between 2**-SAFE and 2**SAFE: no sum of squares leaves fp32, and none that counts is lost
FAR = 2**22  # values from which on no cache is taken to hold what a step moves
STORED = {torch.float16: "half", torch.bfloat16: "brain", torch.float32: "float"}
# Name -> type of what it points to.
EVIDENCE = {"peaks": "float", "sums": "float"}
JUDGED = {"standing": "double", "rules": "double", "told": "double"}
SIGNALS = {f"signal_{name}": "float" for name in ("scale", "found_inf", "divisor", "multiplier")}
OF_SLOTS = {
    "addresses": "int64_t",
    "steps": "float",
    "begun": "float",
    "hyper": "double",
    "group_of": "int32_t",
    "table": "float",
}
WHERE = {"slots_of": "int32_t", "starts": "int64_t", "withins": "int64_t", "counts": "int32_t"}

HEAD = """\
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__F16C__) || defined(__SSE2__)
#include <immintrin.h>
#endif

struct half { uint16_t bits; };
struct brain { uint16_t bits; };

template <class To, class From> static inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same number of bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// One rounding where the processor can, as torch has it.
template <class T> static inline T fused(T a, T b, T c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float widened(half value) {
    const uint32_t rest = value.bits & 0x7fffu, shifted = rest << 13;
    const uint32_t small = bits_as<uint32_t>(bits_as<float>(shifted + 0x38800000u) - bits_as<float>(0x38800000u));
    const uint32_t size = rest < 0x0400u ? small : rest < 0x7c00u ? shifted + 0x38000000u : shifted + 0x70000000u;
    return bits_as<float>(size | (uint32_t)(value.bits & 0x8000u) << 16);
}

static inline half narrowed(half, float value) {
    const uint32_t bits = bits_as<uint32_t>(value), size = bits & 0x7fffffffu;
    const uint32_t small = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000u;
    const uint32_t usual = (size + 0xc8000fffu + ((size >> 13) & 1u)) >> 13;
    uint32_t rounded = size < 0x38800000u ? small : size < 0x477ff000u ? usual : 0x7c00u;
    rounded = size > 0x7f800000u ? 0x7e00u : rounded;
    return {(uint16_t)(rounded | (bits >> 16 & 0x8000u))};
}

static inline float widened(brain value) { return bits_as<float>((uint32_t)value.bits << 16); }

static inline brain narrowed(brain, float value) {
    const uint32_t bits = bits_as<uint32_t>(value), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return {(uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

template <class Stored> static inline void widen(float* __restrict wide, const Stored* __restrict from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) wide[i] = widened(from[i]);
}

static inline void widen(float* __restrict wide, const float* __restrict from, int64_t size) {
    #pragma omp simd
    for (int64_t i = 0; i < size; ++i) wide[i] = from[i];
}

template <class Stored> static inline void narrow(Stored* __restrict to, const float* __restrict wide, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to[i] = narrowed(Stored(), wide[i]);
}

#ifdef __F16C__
static inline void widen(float* __restrict wide, const half* __restrict from, int64_t size) {
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
    for (; i < size; ++i) wide[i] = widened(from[i]);
}

static inline void narrow(half* __restrict to, const float* __restrict wide, int64_t size) {
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < size; ++i) to[i] = narrowed(half(), wide[i]);
}
#endif
"""

MEASURES = """
struct Lanes {
    double totals[LANES] = {};
    float sums[LANES] = {};
    uint32_t most[LANES] = {};
};

// Side by side in lanes of our own number: no processor's width is in the bits of a sum.
static inline void add(Lanes& lanes, const float* __restrict wide, float unit) {
    #pragma omp simd
    for (int64_t i = 0; i < LANES; ++i) {
        const float value = wide[i] * unit;
        const uint32_t magnitude = bits_as<uint32_t>(wide[i]) & 0x7fffffffu;
        lanes.most[i] = lanes.most[i] > magnitude ? lanes.most[i] : magnitude;
        lanes.sums[i] += value * value;
    }
}

template <class Stored> static inline const float* wide(float* room, const Stored* from) {
    widen(room, from, LANES);
    return room;
}

static inline const float* wide(float*, const float* from) { return from; }

template <class Stored>
static inline double squares(const Stored* grads, int64_t count, float unit, uint32_t& largest) {
    Lanes lanes;
    for (int64_t first = 0; first < count; first += READ) {
        const int64_t last = count - first < READ ? count : first + READ, whole = last - (last - first) % LANES;
        for (int64_t i = first; i < whole; i += LANES) {
            alignas(64) float room[LANES];
            add(lanes, wide(room, grads + i), unit);
        }
        if (whole < last) {
            alignas(64) float rest[LANES] = {};
            widen(rest, grads + whole, last - whole);
            add(lanes, rest, unit);
        }
        for (int64_t i = 0; i < LANES; ++i) lanes.totals[i] += lanes.sums[i];
        for (float& sum : lanes.sums) sum = 0.0f;
    }
    double total = 0.0;
    largest = 0;
    for (double each : lanes.totals) total += each;
    for (uint32_t each : lanes.most) largest = largest > each ? largest : each;
    return total;
}
"""
MEASURE = """
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const int32_t slot = slots_of[piece];
        const int64_t address = slot < 0 ? 0 : addresses[slot], count = address ? counts[piece] : 0;
        const STORED* grads = (const STORED*)address + withins[piece];
        uint32_t most;
        float unit = 1.0f;
        double total = squares(grads, count, unit, most);
        const int32_t exponent = (int32_t)(most >> 23) - 127;
        const float peak = bits_as<float>(most);
        if (most == 0 || most >= 0x7f800000u) {
            total = 0.0;
        } else {
            if (exponent < -SAFE || exponent > SAFE) {  // squares might leave fp32, which those of fp16 never do
                const int32_t power = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
                unit = bits_as<float>((uint32_t)(127 - power) << 23);
                total = squares(grads, count, unit, most);
            }
            const double top = (double)(peak * unit);
            total /= top * top;
        }
        peaks[piece] = peak;
        sums[piece] = (float)total;
    }
"""

PUBLISH = """
// Past the caches, that need not read first what is overwritten whole; x86 alone has a way for all compilers.
template <class Stored>
static inline void publish(Stored* __restrict to, const float* __restrict wide, int64_t size, bool past) {
#ifdef __SSE2__
    if (past && ((uintptr_t)to & 15) == 0) {
        alignas(64) Stored near[LANES];
        narrow(near, wide, size);
        const int64_t whole = size - size % 8;
        for (int64_t i = 0; i < whole; i += 8)
            _mm_stream_si128((__m128i*)(to + i), _mm_load_si128((const __m128i*)(near + i)));
        for (int64_t i = whole; i < size; ++i) to[i] = near[i];
        return;
    }
#endif
    (void)past;
    narrow(to, wide, size);
}

static inline void settle() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}
"""

JUDGE = """\
    double most = 0.0, total = 0.0;
    int64_t bad = -1;
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const double peak = peaks[piece];
        if (!(peak <= FLT_MAX)) {
            bad = bad < 0 ? piece : bad;
            continue;
        }
        most = most > peak ? most : peak;
        total += peak * peak * (double)sums[piece];
    }
    const double largest = bad < 0 ? most : INFINITY, norm = bad < 0 ? std::sqrt(total) : INFINITY;
    const double culprit = bad < 0 ? -1.0 : (double)slots_of[bad];"""


def measure_source(grads: torch.dtype) -> str:
    """Return the function that measures gradients of a dtype."""
    own = {"STORED": STORED[grads], "READ": READ, "LANES": LANES, "SAFE": SAFE}
    lines = [PARALLEL, *MEASURE.strip("\n").splitlines()]
    text = MEASURES + function("measure", "threads", {"addresses": "int64_t", **WHERE, **EVIDENCE}, lines)
    for name, value in own.items():
        text = text.replace(name, str(value))
    return HEAD + text


def plan_source(form: Form) -> str:
    """Return the function that decides and works out the numbers of every slot."""
    pointers = {**EVIDENCE, "slots_of": "int32_t", **JUDGED, **SIGNALS, "report": "double", **OF_SLOTS}
    pointers |= {f"scalar_{name}": "float" for name in form.rule.scalars}
    judging, results = lines_of_judgement(CXX)
    following, (skip, factor, unscaled) = results[: len(Standing._fields)], results[len(Standing._fields) :]
    lines = [
        *(f"    const double now_{name} = standing[{i}];" for i, name in enumerate(Standing._fields)),
        *(f"    const double rule_{name} = rules[{i}];" for i, name in enumerate(Rules._fields)),
        *JUDGE.splitlines(),
        *(f"    {line}" for line in judging),
        *(f"    standing[{i}] = told[{i}] = {name};" for i, name in enumerate(following)),
        f"    *signal_scale = (float){following[0]};",
        f"    *signal_found_inf = (float){skip};",
        f"    *signal_divisor = 1.0f / {factor};",
        f"    *signal_multiplier = {factor};",
        *(f"    report[{i}] = {value};" for i, value in enumerate((skip, unscaled, "now_scale", factor))),
        f"    std::memcpy(report + {NEXT_SCALE}, signal_scale, sizeof(float));",
        *numbers_source(form, skip, factor),
    ]
    return HEAD + function("plan", "slots", pointers, lines)


def numbers_source(form: Form, skip: str, factor: str) -> list[str]:
    """Return the lines that work out the numbers of every slot."""
    rule = form.rule
    numbering, results = lines_of_numbers(form, CXX)
    numbers, scalars = results[: form.numbers], results[form.numbers :]
    columns = [*(f"hyper_{i}" for i in range(form.hypers)), *(f"initial_{name}" for name in form.initial)]
    written = ["active", f"sign * {factor}", *numbers, "first_step", *(f"initial_{name}" for name in form.initial)]
    old = {name: f"scalar_{name}[slot]" for name in rule.scalars}
    old |= {n: f"first_step ? (float)initial_{n} : {old[n]}" for n in rule.scalars if n in form.initial}
    return [
        "    for (int64_t slot = 0; slot < slots; ++slot) {",
        f"        const double* own = hyper + (int64_t)group_of[slot] * {1 + len(columns)};",
        f"        const bool active = addresses[slot] != 0 && !{skip}, first_step = begun[slot] == 0.0f;",
        "        const double step = (double)steps[slot] + 1.0;",
        "        const float sign = (float)own[0];",
        *(f"        const double {name} = own[{1 + i}];" for i, name in enumerate(columns)),
        *(f"        const float old_{name} = {value};" for name, value in old.items()),
        *(f"        {line}" for line in numbering),
        f"        float* row = table + slot * {form.width};",
        *(f"        row[{i}] = (float)({value});" for i, value in enumerate(written)),
        "        if (active) {",
        "            steps[slot] += 1.0f;",
        "            begun[slot] = 1.0f;",
        *(f"            scalar_{name}[slot] = {new};" for name, new in zip(rule.scalars, scalars, strict=True)),
        "        }",
        "    }",
    ]


def update_source(form: Form, grads: torch.dtype, model: torch.dtype) -> str:
    """Return the function that steps every piece of a bucket."""
    rule, count, half = form.rule, form.numbers, model != torch.float32
    pointers = {**WHERE, "table": "float", "addresses": "int64_t", "master": "float"}
    pointers |= ({"model": STORED[model]} if half else {}) | {f"state_{name}": "float" for name in rule.state}
    updating, (param, *new) = lines_of_update(form, CXX)
    old = {name: f"its_{name}[i]" for name in rule.state}
    old |= {name: f"first_step ? initial_{name} : {old[name]}" for name in rule.state if name in form.initial}
    lines = [
        *([f"    const bool past = pieces * {PIECE} >= {FAR};"] if half else []),
        PARALLEL,
        "    for (int64_t piece = 0; piece < pieces; ++piece) {",
        "        const int32_t slot = slots_of[piece];",
        f"        const float* row = table + (int64_t)slot * {form.width};",
        "        if (slot < 0 || row[0] == 0.0f) continue;",
        "        const float factor = row[1];",
        *(f"        const float n{i} = row[{OWN + i}];" for i in range(count)),
        f"        const bool first_step = row[{OWN + count}] != 0.0f;",
        *(f"        const float initial_{n} = row[{OWN + count + 1 + i}];" for i, n in enumerate(form.initial)),
        "        (void)first_step;",
        f"        const {STORED[grads]}* grads = (const {STORED[grads]}*)addresses[slot] + withins[piece];",
        "        const auto step = [&](int64_t first, int64_t size) __attribute__((always_inline)) {",
        "            const int64_t place = starts[piece] + first;",
        f"            alignas(64) float wide[{LANES}], shown[{LANES}];",
        "            widen(wide, grads + first, size);",
        "            float* __restrict its_master = master + place;",
        *(f"            float* __restrict its_{name} = state_{name} + place;" for name in rule.state),
        "            #pragma omp simd",
        "            for (int64_t i = 0; i < size; ++i) {",
        "                const float grad = wide[i] * factor, param = its_master[i];",
        *(f"                const float old_{name} = {value};" for name, value in old.items()),
        *(f"                {line}" for line in updating),
        *(f"                its_{name}[i] = {value};" for name, value in zip(rule.state, new, strict=True)),
        f"                its_master[i] = shown[i] = {param};",
        "            }",
        *(["            publish(model + place, shown, size, past);"] if half else []),
        "        };",
        f"        const int64_t count = counts[piece], whole = count - count % {LANES};",
        f"        for (int64_t first = 0; first < whole; first += {LANES}) step(first, {LANES});  // all in registers",
        "        if (whole < count) step(whole, count - whole);",
        *(["        if (past) settle();"] if half else []),
        "    }",
    ]
    return HEAD + PUBLISH.replace("LANES", str(LANES)) + function("update", "threads", pointers, lines)


PARALLEL = "    #pragma omp parallel for schedule(static) num_threads((int)threads)"


def function(name: str, number: str, pointers: dict[str, str], lines: list[str]) -> str:
    """Return a function of (pieces, ``number``, pointers), which finds the pointers under their names."""
    named = [f"    {kind}* {pointer} = ({kind}*)pointers[{i}];" for i, (pointer, kind) in enumerate(pointers.items())]
    head = f'\nextern "C" void {name}(int64_t pieces, int64_t {number}, const int64_t* pointers) {{'
    return "\n".join([head, *named, *lines, "}", ""])
