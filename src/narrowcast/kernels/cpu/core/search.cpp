// Scales that lose least. Compiled once per instruction set. What is tried, in which order, is written in
// kernels/reference/search.py; sums run in the same 64 lanes.

#include "search.h"

#include "encode.h"
#include "search_codes.h"

namespace {

// The nearest stored scale, ties to even, its magnitude at most `limit`.
inline float round_to_stored(float scale, int32_t kind, float limit) {
    if (scale != scale) return scale;
    float magnitude = std::fabs(scale);
    magnitude = magnitude < limit ? magnitude : limit;
    const uint32_t bits = as<uint32_t>(magnitude);
    if (kind == SCALE_BF16) magnitude = as<float>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16);
    if (kind == SCALE_E8M0) magnitude = as<float>((bits + 0x3FFFFF + ((bits >> 23) & 1)) >> 23 << 23);
    if (kind == SCALE_FP16) magnitude = Half::widen(Half::narrow(magnitude));
    magnitude = magnitude < limit ? magnitude : limit;
    return std::copysign(magnitude, scale);
}

// A scale that was tried: what it loses, the scale that fits its codes best, and what is lost with that one (`floor`).
struct Choice {
    Scaling by;
    float loss, floor, fit;
};

inline Choice better(const Choice& found, const Choice& other) { return other.loss < found.loss ? other : found; }
inline Choice promising(const Choice& found, const Choice& other) { return other.floor < found.floor ? other : found; }

// Four sums of 64 lanes each, folded in halves; of 32 the others are zero.
template <int LANES>
inline void fold_four(const float* __restrict a, const float* __restrict b, const float* __restrict c,
                      const float* __restrict d, float* __restrict out) {
#if defined(__AVX2__)
    auto eight = [](const float* __restrict lanes) {
        __m256 sums[4];
        for (int i = 0; i < 4; ++i) {
            sums[i] = _mm256_load_ps(lanes + 8 * i);
            if (LANES == 64) sums[i] = _mm256_add_ps(sums[i], _mm256_load_ps(lanes + 32 + 8 * i));
        }
        return _mm256_add_ps(_mm256_add_ps(sums[0], sums[2]), _mm256_add_ps(sums[1], sums[3]));
    };
    const __m256 first = eight(a), second = eight(b), third = eight(c), fourth = eight(d);
    auto four = [](__m256 one, __m256 other) {
        return _mm256_add_ps(_mm256_permute2f128_ps(one, other, 0x20), _mm256_permute2f128_ps(one, other, 0x31));
    };
    const __m256 front = four(first, second), back = four(third, fourth);
    const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(front, back, 0x44), _mm256_shuffle_ps(front, back, 0xEE));
    const __m256 one = _mm256_add_ps(two, _mm256_movehdup_ps(two));  // of a, c in the lower half, of b, d in the upper
    const __m128 lower = _mm256_castps256_ps128(one), upper = _mm256_extractf128_ps(one, 1);
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm_shuffle_ps(lower, lower, 0x88), _mm_shuffle_ps(upper, upper, 0x88)));
#else
    const float* lanes[4] = {a, b, c, d};
    for (int sum = 0; sum < 4; ++sum) {
        float sums[32];
        for (int i = 0; i < 32; ++i) sums[i] = LANES == 64 ? lanes[sum][i] + lanes[sum][i + 32] : lanes[sum][i];
        for (int i = 0; i < 16; ++i) sums[i] += sums[i + 16];
        for (int i = 0; i < 8; ++i) sums[i] += sums[i + 8];
        for (int i = 0; i < 4; ++i) sums[i] += sums[i + 4];
        out[sum] = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    }
#endif
}

// Sums in lanes: of squared errors, of errors times units, of squared units.
template <int LANES>
struct Sums {
    alignas(64) float errors[LANES], cross[LANES], squares[LANES];
};

// One block in whole pieces of LANES elements. What is behind its last element has no weight.
template <class Codes, int LANES>
struct Block {
    const Spec& spec;
    const Search& how;
    const Codes& codes;
    const float* x;
    const float* weights;  // or null
    int64_t count;

    // Adds a piece to sums, or begins them with it.
    template <bool WEIGHTED, bool FIRST>
    inline void add(int64_t begin, Scaling by, Sums<LANES>& sums) const {
        const float* __restrict here = x + begin;
        const float* __restrict w = WEIGHTED ? weights + begin : here;
        alignas(64) float units[LANES];
        if constexpr (Codes::BITS != 0) codes.template units<LANES>(here, by, units);
        else for (int i = 0; i < LANES; ++i) units[i] = codes.unit(here[i], by);
        const float scale = by.scale;
        for (int i = 0; i < LANES; ++i) {
            const float unit = units[i], error = here[i] - Codes::value(unit, scale);
            float squared = error * error, cross = error * unit, square = unit * unit;
            if (WEIGHTED) squared *= w[i], cross *= w[i], square *= w[i];
            sums.errors[i] = FIRST ? squared : sums.errors[i] + squared;
            sums.cross[i] = FIRST ? cross : sums.cross[i] + cross;
            sums.squares[i] = FIRST ? square : sums.squares[i] + square;
        }
    }

    template <bool WEIGHTED>
    inline void sum(Scaling by, Sums<LANES>& sums) const {
        add<WEIGHTED, true>(0, by, sums);
        for (int64_t begin = LANES; begin < count; begin += LANES) add<WEIGHTED, false>(begin, by, sums);
    }

    // The gain over the weighted squares of the block; 0 for no gain.
    inline float share() const {
        if (how.gain == 0.0f) return 0.0f;
        alignas(64) float squares[LANES];
        for (int64_t begin = 0; begin < count; begin += LANES) {
            for (int i = 0; i < LANES; ++i) {
                float square = x[begin + i] * x[begin + i];
                if (weights) square *= weights[begin + i];
                squares[i] = begin ? squares[i] + square : square;
            }
        }
        float total[4];
        fold_four<LANES>(squares, squares, squares, squares, total);
        return how.gain / total[0];
    }

    // What is known of a scale by its three sums; see `Blocks.choice` of the reference.
    inline Choice known(Scaling by, float loss, float slope, float bend, float share) const {
        if (how.gain != 0.0f) {
            const float lacking = loss + by.scale * slope, reached = slope + by.scale * bend, pull = share * lacking;
            loss = loss + pull * lacking, slope = slope + pull * reached, bend = bend + share * reached * reached;
        }
        const float step = slope / bend;
        // A power of two is far from the one that fits best: it is judged by what it loses itself.
        return Choice{by, loss, spec.scale == SCALE_E8M0 ? loss : loss - slope * step, by.scale + step};
    }

    inline Choice choice(Scaling by, float share) const {
        Sums<LANES> sums;
        if (weights) sum<true>(by, sums);
        else sum<false>(by, sums);
        float total[4];
        fold_four<LANES>(sums.errors, sums.cross, sums.squares, sums.squares, total);
        return known(by, total[0], total[1], total[2], share);
    }

    // The nearest scale and three others at once: their sums are folded, and their fits divided, side by side.
    template <bool WEIGHTED>
    inline Choice lowest_of_four(Scaling nearest, float share, Choice& first) const {
        Sums<LANES> sums[4];
        Scaling by[4];
        bool allowed[4];
        for (int i = 0; i < 4; ++i) {
            const float scale = i ? round_to_stored(nearest.scale * how.factors[i - 1], spec.scale, spec.limit) : nearest.scale;
            allowed[i] = i == 0 || (spec.signed_scale ? std::fabs(scale) : scale) >= 0x1p-126f;
            by[i].scale = allowed[i] ? scale : nearest.scale, by[i].zero = nearest.zero;
        }
        for (int i = 0; i < 4; ++i) by[i].inverse = 1.0f / by[i].scale;
        by[0].inverse = nearest.inverse;
        for (int i = 0; i < 4; ++i) sum<WEIGHTED>(by[i], sums[i]);
        float loss[4], cross[4], squares[4];
        fold_four<LANES>(sums[0].errors, sums[1].errors, sums[2].errors, sums[3].errors, loss);
        fold_four<LANES>(sums[0].cross, sums[1].cross, sums[2].cross, sums[3].cross, cross);
        fold_four<LANES>(sums[0].squares, sums[1].squares, sums[2].squares, sums[3].squares, squares);
        Choice known_of[4];
        for (int i = 0; i < 4; ++i) known_of[i] = known(by[i], loss[i], cross[i], squares[i], share);
        // Which one wins cannot be foretold: no branches.
        uint32_t at = 0;
        float low = known_of[0].floor;
        for (uint32_t i = 1; i < 4; ++i) {
            const bool less = allowed[i] & (known_of[i].floor < low);
            at ^= (at ^ i) & (0u - uint32_t(less));
            low = known_of[at].floor;
        }
        first = known_of[0];
        return known_of[at];
    }

    // The stored scale nearest to `wanted`; one that may not be used never wins.
    inline Choice choice(float wanted, int32_t zero, float share) const {
        const float scale = round_to_stored(wanted, spec.scale, spec.limit);
        if (!((spec.signed_scale ? std::fabs(scale) : scale) >= 0x1p-126f)) return Choice{{}, HUGE_VALF, HUGE_VALF, NOT_A_NUMBER};
        return choice(Scaling{scale, 1.0f / scale, zero}, share);
    }

    Scaling best(Scaling nearest) const {
        Choice first, found;
        const float share = this->share();
        if (how.factor_count == 3 && spec.scale != SCALE_E8M0) {
            found = weights ? lowest_of_four<true>(nearest, share, first) : lowest_of_four<false>(nearest, share, first);
        } else {
            found = first = choice(nearest, share);
            for (int64_t i = 0; i < how.factor_count; ++i) {
                found = promising(found, choice(nearest.scale * how.factors[i], nearest.zero, share));
            }
        }
        for (int step = -1; spec.element == AFFINE && step <= 1; step += 2) {
            const int32_t zero = std::min(std::max(found.by.zero + step, 0), (1 << spec.bits) - 1);
            found = promising(found, choice(Scaling{found.by.scale, found.by.inverse, zero}, share));
        }
        Choice least = better(first, found);
        for (int64_t i = 0; i < how.refinements; ++i) {
            found = choice(found.fit, found.by.zero, share);
            least = better(least, found);
        }
        return least.by;
    }
};

void write(const Spec& spec, const Batch& batch, int64_t block, int64_t blocks, uint8_t* out) {
    uint8_t* at = out + spec.scales_offset;
    switch (spec.scale) {
        case SCALE_FP32: write_scales<SCALE_FP32>(batch.scale, blocks, at + 4 * block); break;
        case SCALE_BF16: write_scales<SCALE_BF16>(batch.scale, blocks, at + 2 * block); break;
        case SCALE_FP16: write_scales<SCALE_FP16>(batch.scale, blocks, at + 2 * block); break;
        default: write_scales<SCALE_E8M0>(batch.scale, blocks, at + block);
    }
    for (int64_t i = 0; spec.element == AFFINE && i < blocks; ++i) out[spec.zeros_offset + block + i] = uint8_t(batch.zero[i]);
}

// A block that does not end with a piece, continued with zeros that have no weight.
struct Padded {
    float *x, *weights;
    int64_t count = 0;

    Padded(const float* block, const float* importance, int64_t n, float* room) : x(room), count((n + PIECE - 1) / PIECE * PIECE) {
        weights = room + count;
        std::memcpy(x, block, size_t(n) * 4);
        std::fill(x + n, x + count, 0.0f);
        if (importance) std::memcpy(weights, importance, size_t(n) * 4);
        else std::fill(weights, weights + n, 1.0f);
        std::fill(weights + n, weights + count, 0.0f);
    }
};

// Replaces the scales of the blocks of a batch by those that lose least.
template <class Codes>
void search_batch(const Spec& spec, const Codes& codes, const float* x, int64_t begin, int64_t count, const Search& how,
                  float* room, Batch& batch) {
    const int64_t size = spec.block_size;
    for (int64_t g = 0; g * size < count; ++g) {
        if (batch.inverse[g] == 0.0f) continue;  // not all of it is finite
        const int64_t n = std::min(size, count - g * size);
        const float* block = x + g * size;
        const float* weights = how.importance ? how.importance + begin + g * size : nullptr;
        const Scaling nearest{batch.scale[g], batch.inverse[g], batch.zero[g]};
        Scaling by;
        if (Codes::SMALL && n == PIECE / 2) {
            by = Block<Codes, Codes::SMALL ? PIECE / 2 : PIECE>{spec, how, codes, block, weights, n}.best(nearest);
        } else if (n % PIECE) {
            const Padded padded(block, weights, n, room);
            by = Block<Codes, PIECE>{spec, how, codes, padded.x, padded.weights, padded.count}.best(nearest);
        } else {
            by = Block<Codes, PIECE>{spec, how, codes, block, weights, n}.best(nearest);
        }
        batch.scale[g] = by.scale, batch.inverse[g] = by.inverse, batch.zero[g] = by.zero;
    }
}

template <class Codes>
void encode_blocks(const Spec& spec, const Kernels& k, Floats row, int64_t first, int64_t end, const Search& how,
                   float* scratch, uint8_t* out) {
    Spec nearest = spec;  // codes are the nearest, whatever the codec does otherwise
    nearest.stochastic = 0;
    const Codes codes(spec);
    Batch batch;
    const int64_t size = spec.block_size, blocks = blocks_in_batch(size);
    float* room = scratch + std::max(size, BATCH);
    for (int64_t block = first; block < end; block += blocks) {
        const int64_t begin = block * size, here = std::min(blocks, end - block);
        const int64_t count = std::min(here * size, spec.numel - begin);
        const float* x = load(row, begin, count, scratch);
        if (count <= BATCH) measure_batch<Codes::ELEMENT>(x, count, size, batch);
        else EncodeBlocks::measure_large<Codes::ELEMENT>(row, begin, count, batch, 0);
        settle_batch<Codes::ELEMENT>(spec, batch, block, here, count - (here - 1) * size, out);
        search_batch(nearest, codes, x, begin, count, how, room, batch);
        write(spec, batch, block, here, out);
        if (count <= BATCH) k.quantize_batch(nearest, row, begin, count, batch, out);
        else k.quantize(nearest, row, begin, count, Scaling{batch.scale[0], batch.inverse[0], batch.zero[0]}, out, 0);
    }
}

void encode(const Spec& spec, const Kernels& k, Floats row, int64_t first, int64_t end, const Search& how, float* x,
            uint8_t* out) {
    auto as = [&](auto run) { run(spec, k, row, first, end, how, x, out); };
    switch (spec.element) {
        case INT: return as(encode_blocks<Integers>);
        case AFFINE: return as(encode_blocks<Affine>);
        case SIGN: return as(encode_blocks<Signs>);
        case E4M3: return as(encode_blocks<NarrowFloats<Fp8E4M3, E4M3>>);
        case E5M2: return as(encode_blocks<NarrowFloats<Fp8E5M2, E5M2>>);
        default: with_bits(spec.bits, [&](auto bits) { as(encode_blocks<Places<decltype(bits)::value>>); });
    }
}

}  // namespace

namespace nc {
const SearchKernels NC_NAMED_BY_ISA(search) = {::encode};
}  // namespace nc
