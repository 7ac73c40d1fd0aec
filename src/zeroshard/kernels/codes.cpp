// The codes of compressed activations on a CPU, each the bits that its module computes in torch's operations.

#include <cstdint>
#include <cstring>

namespace {

// Codes of a small floating-point number: sign, `exponent` bits, `mantissa` bits; see small_floats.py.
struct Format {
    int mantissa;
    uint32_t offset;    // of the exponent: fp32's bias less this format's, at its place in a code
    uint32_t least;     // code of the smallest number above zero
    uint32_t most;      // code of the largest finite number
    uint32_t nan;
    uint32_t half_least;  // fp32's bits of half the smallest number
    int sign;           // place of the sign

    Format(int exponent_bits, int mantissa_bits) : mantissa(mantissa_bits) {
        const int bias = (1 << (exponent_bits - 1)) - 1;
        offset = uint32_t(127 - bias) << mantissa;
        least = 1u << mantissa;
        most = (((1u << exponent_bits) - 1) << mantissa) - 1;
        nan = (most + 1) | 1u << (mantissa - 1);
        half_least = uint32_t(127 - bias) << 23;
        sign = exponent_bits + mantissa_bits;
    }

    uint32_t encode(uint32_t bits) const {
        const int shift = 23 - mantissa;
        const uint32_t size = bits & 0x7fffffffu;
        const uint32_t rounded = (size + ((1u << (shift - 1)) - 1) + ((size >> shift) & 1)) >> shift;
        uint32_t code = rounded - offset;
        code = size > half_least && rounded < offset + least ? least : code;
        code = size <= half_least ? 0u : code;
        code = size > half_least && rounded >= offset + least && code > most ? most : code;
        code = size == 0x7f800000u ? most + 1 : code;
        code = size > 0x7f800000u ? nan : code;
        return code | (bits >> 31) << sign;
    }

    uint32_t decode(uint32_t code) const {
        const uint32_t size = code & ((1u << sign) - 1);
        uint32_t bits = (size + offset) << (23 - mantissa);
        bits = size < least ? 0u : bits;
        bits = size > most ? 0x7f800000u | (size - most - 1) << (23 - mantissa) : bits;
        return bits | (code >> sign & 1u) << 31;
    }
};

template <typename Word>
void encode_each(const Format format, const uint32_t* from, int64_t n, Word* into) {
    for (int64_t i = 0; i < n; ++i) into[i] = Word(format.encode(from[i]));
}

template <typename Word>
void decode_each(const Format format, const Word* from, int64_t n, uint32_t* into) {
    for (int64_t i = 0; i < n; ++i) into[i] = format.decode(from[i]);
}

template <typename Word>
int64_t count(const Word* from, int64_t n) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += from[i] != 0;
    return found;
}

template <typename Word>
void to_sparse(const Word* from, int64_t n, int64_t found, Word* values, uint8_t* columns, int32_t* starts) {
    int64_t at = 0, row = 0;
    for (int64_t begin = 0; begin < n; begin += 256) {
        starts[row++] = int32_t(at);
        const int64_t length = n - begin < 256 ? n - begin : 256;
        if (at + length < found) {  // then a zero can be written too, which the next value takes the place of
            for (int64_t column = 0; column < length; ++column) {
                const Word value = from[begin + column];
                values[at] = value;
                columns[at] = uint8_t(column);
                at += value != 0;
            }
            continue;
        }
        for (int64_t column = 0; column < length; ++column) {
            if (from[begin + column] == 0) continue;
            values[at] = from[begin + column];
            columns[at++] = uint8_t(column);
        }
    }
    starts[row] = int32_t(at);
}

template <typename Word>
void from_sparse(const Word* values, const uint8_t* columns, const int32_t* starts, int64_t n, Word* into) {
    std::memset(into, 0, size_t(n) * sizeof(Word));
    for (int64_t row = 0; row * 256 < n; ++row)
        for (int64_t at = starts[row]; at < starts[row + 1]; ++at) into[row * 256 + columns[at]] = values[at];
}

}  // namespace

extern "C" {

// Codes of n fp32 numbers: `exponent` 5, `mantissa` 10 in 16 bits; 5, 4 three to a word; 4, 3 in 8 bits.
void zeroshard_encode(int exponent, int mantissa, const uint32_t* from, int64_t n, void* into) {
    const Format format(exponent, mantissa);
    if (mantissa == 10) return encode_each(format, from, n, static_cast<uint16_t*>(into));
    if (mantissa == 3) return encode_each(format, from, n, static_cast<uint8_t*>(into));
    uint32_t* words = static_cast<uint32_t*>(into);
    const int64_t whole = n / 3;
    for (int64_t i = 0; i < whole; ++i)
        words[i] = format.encode(from[3 * i]) | format.encode(from[3 * i + 1]) << 10 |
                   format.encode(from[3 * i + 2]) << 20;
    if (n % 3) {
        uint32_t word = format.encode(from[3 * whole]);
        if (n % 3 == 2) word |= format.encode(from[3 * whole + 1]) << 10;
        words[whole] = word;
    }
}

void zeroshard_decode(int exponent, int mantissa, const void* from, int64_t n, uint32_t* into) {
    const Format format(exponent, mantissa);
    if (mantissa == 10) return decode_each(format, static_cast<const uint16_t*>(from), n, into);
    if (mantissa == 3) return decode_each(format, static_cast<const uint8_t*>(from), n, into);
    const uint32_t* words = static_cast<const uint32_t*>(from);
    for (int64_t i = 0; i < n / 3; ++i)
        for (int part = 0; part < 3; ++part) into[3 * i + part] = format.decode(words[i] >> 10 * part & 1023u);
    for (int64_t i = n / 3 * 3; i < n; ++i) into[i] = format.decode(words[n / 3] >> 10 * (i % 3) & 1023u);
}

// Words that are not zero; `size` bytes each.
int64_t zeroshard_count(int size, const void* from, int64_t n) {
    if (size == 2) return count(static_cast<const uint16_t*>(from), n);
    if (size == 4) return count(static_cast<const uint32_t*>(from), n);
    return count(static_cast<const uint64_t*>(from), n);
}

// Rows of 256 columns, in which `found` words are not zero.
void zeroshard_to_sparse(int size, const void* from, int64_t n, int64_t found, void* values, uint8_t* columns,
                         int32_t* starts) {
    if (size == 2)
        to_sparse(static_cast<const uint16_t*>(from), n, found, static_cast<uint16_t*>(values), columns, starts);
    else if (size == 4)
        to_sparse(static_cast<const uint32_t*>(from), n, found, static_cast<uint32_t*>(values), columns, starts);
    else
        to_sparse(static_cast<const uint64_t*>(from), n, found, static_cast<uint64_t*>(values), columns, starts);
}

void zeroshard_from_sparse(int size, const void* values, const uint8_t* columns, const int32_t* starts, int64_t n,
                           void* into) {
    if (size == 2)
        from_sparse(static_cast<const uint16_t*>(values), columns, starts, n, static_cast<uint16_t*>(into));
    else if (size == 4)
        from_sparse(static_cast<const uint32_t*>(values), columns, starts, n, static_cast<uint32_t*>(into));
    else
        from_sparse(static_cast<const uint64_t*>(values), columns, starts, n, static_cast<uint64_t*>(into));
}

// Eight flags of a byte each to a byte, the first lowest.
void zeroshard_pack_bits(const uint8_t* flags, int64_t n, uint8_t* into) {
    const int64_t whole = n / 8;
    for (int64_t i = 0; i < whole; ++i) {
        uint8_t byte = 0;
        for (int bit = 0; bit < 8; ++bit) byte |= uint8_t((flags[8 * i + bit] != 0) << bit);
        into[i] = byte;
    }
    if (n % 8) {
        into[whole] = 0;
        for (int64_t i = 8 * whole; i < n; ++i) into[whole] |= uint8_t((flags[i] != 0) << (i - 8 * whole));
    }
}

void zeroshard_unpack_bits(const uint8_t* from, int64_t n, uint8_t* flags) {
    for (int64_t i = 0; i < n; ++i) flags[i] = from[i / 8] >> (i % 8) & 1;
}

}  // extern "C"
