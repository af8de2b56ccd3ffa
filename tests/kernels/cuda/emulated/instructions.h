// kernels/cuda/instructions.cuh in plain C++: the same functions, to the bit where the hardware says which.
//
// Sums of an mma are fp32, one product after the other; tensor cores promise no order.
#pragma once

#include "cuda.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// PTX: four bits for each byte of the result: which of the eight bytes, and whether its sign alone, eight times over.
static inline u32 prmt(u32 a, u32 b, u32 select) {
    const u64 both = u64(b) << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 from = select >> (4 * i) & 15, byte = both >> (8 * (from & 7)) & 0xFF;
        result |= (from & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << (8 * i);
    }
    return result;
}

static inline u32 insert(u32 word, u32 mask, u32 base) { return (word & mask) ^ base; }
static inline uint4 stream16(const void* p) { return *(const uint4*)p; }
static inline void admit_the_next() {}
static inline void after_the_last() {}

// A copy on its way arrives when its thread waits for it, as late as it may.
struct Copy {
    void* to;
    char bytes[16];
    int lot;
};
constexpr int COPIES = 512;  // that one thread may have on their way
static Copy copies[1024][COPIES];
static int on_their_way[1024], lots[1024];

static inline u64 used_once() { return 0; }
static inline void copy16(void* to, const void* from, bool some, u64) {
    const int thread = threadIdx.x;
    if (on_their_way[thread] == COPIES) return machine::fail("has too many copies on their way: COPIES of instructions.h", thread);
    if ((size_t)to % 16 || (size_t)from % 16) return machine::fail("copies to or from where it is not aligned", thread);
    Copy& one = copies[thread][on_their_way[thread]++];
    one.to = to, one.lot = lots[thread];
    memset(one.bytes, 0, 16);
    if (some) memcpy(one.bytes, from, 16);
}
static inline void copy16(void* to, const void* from, bool some) { copy16(to, from, some, 0); }
static inline void end_lot() { ++lots[threadIdx.x]; }
template <int LEFT>
static inline void await_lots() {
    const int thread = threadIdx.x;
    int kept = 0;
    for (int i = 0; i < on_their_way[thread]; ++i) {
        const Copy one = copies[thread][i];
        if (one.lot < lots[thread] - LEFT) memcpy(one.to, one.bytes, 16);
        else copies[thread][kept++] = one;
    }
    on_their_way[thread] = kept;
}

// Shared memory that is asked for lies 1024 bytes behind the beginning of all, as on a GPU.
static char* beginning;
static inline u32 shared_address(const void* p) {
    beginning = (char*)p - 1024;
    return 1024;
}
static inline float read_shared(u32 address) { return *(const float*)(beginning + address); }
static inline void write_shared(u32 address, float value) { *(float*)(beginning + address) = value; }

// To `digits` binary digits, none below 2^lowest; to the nearest, halfway to the even one.
static inline double rounded(double value, int digits, int lowest) {
    if (value == 0 || !__builtin_isfinite(value)) return value;
    const int last = __builtin_ilogb(value) - digits + 1;
    const int place = last < lowest ? lowest : last;
    return __builtin_ldexp(__builtin_nearbyint(__builtin_ldexp(value, -place)), place);
}

static inline float half_value(u32 bits) {
    const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent ? __builtin_ldexp(1024 + fraction, int(exponent) - 25) : __builtin_ldexp(fraction, -24);
    if (exponent == 31) value = fraction ? __builtin_nan("") : __builtin_inf();
    return float(bits & 0x8000 ? -value : value);
}

static inline u16 half_of(double value) {
    if (__builtin_isnan(value)) return 0x7FFF;
    const u16 sign = __builtin_signbit(value) ? 0x8000 : 0;
    const double size = __builtin_fabs(rounded(value, 11, -24));
    if (size >= 65536) return sign | 0x7C00;
    if (size < __builtin_ldexp(1, -14)) return sign | u16(__builtin_ldexp(size, 24));
    const int exponent = __builtin_ilogb(size);
    return sign | u16((exponent + 15) << 10 | (int(__builtin_ldexp(size, 10 - exponent)) - 1024));
}

static inline u16 bfloat_of(double value) {
    if (__builtin_isnan(value)) return 0x7FFF;
    const float near = float(rounded(value, 8, -133));  // too large a number becomes infinite here
    u32 bits;
    memcpy(&bits, &near, 4);
    return u16(bits >> 16);
}

static inline u16 half_bits(float value) { return half_of(value); }
static inline u16 bfloat_bits(float value) { return bfloat_of(value); }
static inline u32 bfloat_pair(float low, float high) { return u32(bfloat_of(high)) << 16 | bfloat_of(low); }

static inline float x_value(u32 bits) { return X == 1 ? half_value(bits & 0xFFFF) : __uint_as_float(bits << 16); }

// A sum of two halves is exact in fp64, so that it is rounded once.
static inline u32 plus(u32 pair, u32 offset) {
    u32 result = 0;
    for (int i = 0; i < 32; i += 16) {
        const double sum = double(x_value(pair >> i)) + x_value(offset >> i);
        result |= u32(X == 1 ? half_of(sum) : bfloat_of(sum)) << i;
    }
    return result;
}

// A product of halves is exact in fp64, and so is its sum with a half of about its size; one far smaller only decides ties.
static inline u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 result = 0;
    for (int i = 0; i < 32; i += 16) {
        const double value = __builtin_fma(double(x_value(a >> i)), double(x_value(b >> i)), double(x_value(c >> i)));
        result |= u32(X == 1 ? half_of(value) : bfloat_of(value)) << i;
    }
    return result;
}

static inline u32 pair_of(float low, float high) {
    return X == 1 ? u32(half_of(high)) << 16 | half_of(low) : bfloat_pair(low, high);
}

static inline u16 half_of_fp8(u32 byte, bool e5m2) {
    if (e5m2) return u16(byte << 8);
    const u32 exponent = byte >> 3 & 15, fraction = byte & 7;
    double value = exponent ? __builtin_ldexp(8 + fraction, int(exponent) - 10) : __builtin_ldexp(fraction, -9);
    if ((byte & 0x7F) == 0x7F) value = __builtin_nan("");
    return half_of(byte & 0x80 ? -value : value);
}
static inline u32 fp8_pair(u32 bytes, bool e5m2) { return u32(half_of_fp8(bytes >> 8 & 255, e5m2)) << 16 | half_of_fp8(bytes & 255, e5m2); }

static inline u32 rotate(u32 word, u32 by) { return by % 32 ? word >> by % 32 | word << (32 - by % 32) : word; }

struct Fragments {
    u32 a[4], b[2];
    float* c;
};

// PTX on m16n8k16: lane 4 g + t holds of A rows g and g + 8 (registers 0 and 1; 2 and 3) at k = 2 t, 2 t + 1 (and 8 on), of B
// column g at the same k, of C rows g and g + 8, columns 2 t and 2 t + 1.
static inline void multiply(void* const* brought) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < machine::WARP; ++lane) {
        const Fragments& mine = *(const Fragments*)brought[lane];
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 4; ++i) {
                a[g + i % 2 * 8][i / 2 * 8 + 2 * t + half] = x_value(mine.a[i] >> (16 * half));
                if (i < 2) b[i * 8 + 2 * t + half][g] = x_value(mine.b[i] >> (16 * half));
            }
    }
    for (int lane = 0; lane < machine::WARP; ++lane)
        for (int i = 0; i < 4; ++i) {
            float& sum = ((const Fragments*)brought[lane])->c[i];
            for (int k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
        }
}

static inline void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Fragments mine = {{a0, a1, a2, a3}, {b0, b1}, c};
    machine::wait_in_warp(multiply, &mine);
}

// What device.py makes of nvrtc.Boxes, as large as what the driver makes.
struct alignas(64) Map {
    const char* address;
    u64 rows, apart, end, line, height, unused[10];
};
typedef u64 Gate;

static inline void set_gate(Gate* gate, u32 count) { machine::set_gate(gate, count); }
static inline void show_gates() {}
static inline void pass(Gate* gate) { machine::pass(gate, 0); }
static inline void expect(Gate* gate, u32 bytes) { machine::pass(gate, bytes); }
static inline void await_gate(Gate* gate, u32 phase) { machine::wait_at_gate(gate, phase); }
static inline void meet(int number, int threads) { machine::wait_at_barrier(number, threads); }
template <int COUNT>
static inline void give_registers() {}
template <int COUNT>
static inline void take_registers() {}

static inline void announce(const Map&) {}

static inline void copy_lines(const machine::BoxCopy& box) {
    const Map& map = *(const Map*)box.map;
    for (u64 r = 0; r < map.height; ++r)
        for (u64 i = 0; i < map.line; ++i) {
            const u64 row = box.row + r, column = box.column + i, place = r * map.line + i, exchange = map.line / 16 - 1;
            const bool there = row < map.rows && column < map.end;
            ((char*)box.to)[place ^ (place >> 7 & exchange) << 4] = there ? map.address[row * map.apart + column] : 0;
        }
}

static inline void copy_box(void* to, const Map& map, int column, int row, Gate* gate) {
    if ((size_t)to % (map.line * 8) || map.height > 256 || map.apart % 16 || map.apart < map.end || (size_t)map.address % 16)
        return machine::fail("copies a box to or from where it is not aligned, or too large a one", threadIdx.x);
    machine::copy_box({machine::gate_at(gate), copy_lines, &map, to, column, row, long(map.line * map.height)});
}

static inline void copy_whole(const machine::BoxCopy& line) { memcpy(line.to, line.map, line.bytes); }

static inline void copy_line(void* to, const void* from, u32 bytes, Gate* gate) {
    if ((size_t)to % 16 || (size_t)from % 16 || bytes % 16 || !bytes) return machine::fail("copies a line that is not sixteens of bytes", threadIdx.x);
    machine::copy_box({machine::gate_at(gate), copy_whole, from, to, 0, 0, long(bytes)});
}

template <bool HIGH>
static inline u32 e4m3_pair(u32 word) {
    float values[2];
    for (int i = 0; i < 2; ++i) {
        const u32 bits = word >> (8 * i + 16 * HIGH), exponent = bits >> 3 & 15, fraction = bits & 7;
        double value = exponent ? __builtin_ldexp(8 + fraction, int(exponent) - 10) : __builtin_ldexp(fraction, -9);
        if ((bits & 127) == 127) value = __builtin_nan("");
        values[i] = float(bits & 128 ? -value : value);
    }
    return pair_of(values[0], values[1]);
}

static inline void show_tensor_cores() {}
static inline void begin_products() {}
static inline void end_products() {}
template <int LEFT, int COUNT>
static inline void await_products(float (&)[COUNT]) {}

template <int LEFT>
static inline void await_operands() {}

struct Turned {
    u16* to;
    u32 a[4];
};

// PTX on stmatrix, transposed: lane 4 g + t holds of each matrix row g, columns 2 t and 2 t + 1.
static inline void turn(void* const* brought) {
    for (int lane = 0; lane < machine::WARP; ++lane)
        for (int i = 0; i < 4; ++i)
            for (int half = 0; half < 2; ++half)
                ((Turned*)brought[8 * i + lane % 4 * 2 + half])->to[lane / 4] = u16(((Turned*)brought[lane])->a[i] >> (16 * half));
}

static inline void store_turned(void* to, u32 a, u32 b, u32 c, u32 d) {
    if ((size_t)to % 16) return machine::fail("stores a matrix where it is not aligned", threadIdx.x);
    Turned mine = {(u16*)to, {a, b, c, d}};
    machine::wait_in_warp(turn, &mine);
}

// `apart`: eights of elements from one half of k to the other, or 0 for lines of 128 bytes whose sixteens are exchanged.
struct Place {
    const u16* at;
    int apart;
    u16 element(int k, int n) const {
        if (apart) return at[(k / 8 * apart + n) * 8 + k % 8];
        const size_t place = (size_t)at + n * 128 + k * 2;
        return *(const u16*)(place ^ (place >> 7 & 7) << 4);
    }
};

struct Shares {
    u32 a[4];
    Place b;
    float* c;
    int count;
    bool more;
};

// A warp has sixteen of the rows, which do not depend on the others.
static inline void multiply_shares(void* const* brought) {
    float a[16][16];
    const Shares& any = *(const Shares*)brought[0];
    for (int lane = 0; lane < machine::WARP; ++lane) {
        const Shares& mine = *(const Shares*)brought[lane];
        if (mine.b.at != any.b.at || mine.more != any.more) return machine::fail("gives wgmma other arguments than its warp", threadIdx.x);
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + half] = x_value(mine.a[i] >> (16 * half));
    }
    for (int lane = 0; lane < machine::WARP; ++lane)
        for (int i = 0; i < any.count; ++i) {
            float& sum = ((const Shares*)brought[lane])->c[i];
            const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (!any.more) sum = 0;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * x_value(any.b.element(k, column));
        }
}

template <int N>
static inline Place place_of(const void* b) {
    return {(const u16*)b, N};
}
static inline Place place_of_lines(const void* b) {
    if ((size_t)b % 1024) machine::fail("gives wgmma lines that are not aligned", threadIdx.x);
    return {(const u16*)b, 0};
}
static inline Place further(Place b, int many) { return {b.at + many * 8, b.apart}; }

template <int COUNT>
static inline void wgmma(float (&c)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, Place b, bool more) {
    Shares mine = {{a0, a1, a2, a3}, b, c, COUNT, more};
    machine::wait_in_warp(multiply_shares, &mine);
}
