#include "tables/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/tables/table_test_support.h"

namespace ehc::tables {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string npy_bytes(std::string_view header, std::string_view data, int version = 1) {
  std::string bytes = "\x93NUMPY";
  bytes += {static_cast<char>(version), '\0'};
  const int length_bytes = version == 1 ? 2 : 4;
  for (int i = 0; i < length_bytes; ++i) bytes += static_cast<char>(header.size() >> (8 * i));
  return bytes.append(header).append(data);
}

std::string header_of(std::string_view descr, std::string_view shape) {
  return "{'descr': '" + std::string(descr) +
         "', 'fortran_order': False, 'shape': " + std::string(shape) + ", }\n";
}

std::string fault(std::string_view bytes) {
  return error_text(ErrorKind::io, [&] { (void)parse_npy(bytes, "f"); });
}

TEST(NpyRead, EveryVersion) {
  for (const int version : {1, 2, 3}) {
    const NpyArray array =
        parse_npy(npy_bytes(header_of("<i4", "(2, 1)"),
                            std::string_view("\1\0\0\0\xff\xff\xff\xff", 8), version),
                  "f");
    EXPECT_EQ(array.tensor.dtype, DType::i32);
    ASSERT_EQ(array.tensor.rank, 2);
    EXPECT_EQ(array.tensor.shape[0], 2);
    EXPECT_EQ(array.tensor.shape[1], 1);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(array.tensor.data) % kDataAlignment, 0u);
    EXPECT_EQ(array.tensor.as<int32_t>()[0], 1);
    EXPECT_EQ(array.tensor.as<int32_t>()[1], -1);
  }
}

// The bytes that numpy.save writes for numpy.arange(3, dtype='<i8').
TEST(NpyRead, FileOfNumpy) {
  std::string header = "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }";
  header.resize(117, ' ');
  const int64_t values[3] = {0, 1, 2};
  const NpyArray array = parse_npy(
      npy_bytes(header + "\n", {reinterpret_cast<const char*>(values), sizeof(values)}), "f");
  ASSERT_EQ(array.tensor.rank, 1);
  EXPECT_EQ(std::memcmp(array.tensor.data, values, sizeof(values)), 0);
}

TEST(NpyRead, ScalarsEmptyArraysAndKeyOrder) {
  EXPECT_EQ(parse_npy(npy_bytes(header_of("|u1", "()"), "x"), "f").tensor.rank, 0);
  EXPECT_EQ(parse_npy(npy_bytes(header_of("<f4", "(0, 3)"), ""), "f").tensor.numel(), 0);
  EXPECT_EQ(fault(npy_bytes("{\"shape\":(1,),\"descr\":\"|u1\",\"fortran_order\":False}", "x")),
            "no error");
}

TEST(NpyWrite, SurvivesReading) {
  const ScratchFolder folder;
  const uint8_t bytes[16] = {1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0};
  for (const DType dtype :
       {DType::f32, DType::f16, DType::i64, DType::i32, DType::u8, DType::boolean}) {
    const auto count = static_cast<int64_t>(sizeof(bytes) / size_of(dtype));
    for (const Tensor& tensor :
         {Tensor(bytes, dtype, {count / 2, 2}), Tensor(bytes, dtype, {count}),
          Tensor(bytes, dtype, {}), Tensor(bytes, dtype, {0, 4})}) {
      write_npy(folder.file("a.npy"), tensor);
      EXPECT_EQ(read_bytes(folder.file("a.npy")).find('\n') % 64, 63u);
      const NpyArray array = read_npy(folder.file("a.npy"));
      EXPECT_EQ(array.tensor.dtype, dtype);
      ASSERT_EQ(array.tensor.rank, tensor.rank);
      EXPECT_TRUE(std::equal(tensor.shape, tensor.shape + kMaxRank, array.tensor.shape));
      EXPECT_EQ(std::memcmp(array.tensor.data, bytes,
                            static_cast<size_t>(tensor.numel()) * size_of(dtype)),
                0);
    }
  }
}

TEST(NpyWrite, RefusesWhatNumpyDoesNotHave) {
  const uint8_t bytes[8] = {};
  const auto refused = [&](const Tensor& tensor) {
    return error_text(ErrorKind::contract, [&] { write_npy("/nowhere/a.npy", tensor); });
  };
  EXPECT_EQ(refused({bytes, DType::bf16, {2}}),
            "npy: expected F32, F16, I64, I32, U8 or BOOL, got BF16");
  EXPECT_THAT(refused({}), HasSubstr("got absent"));
  Tensor strided(bytes, DType::u8, {2, 2});
  strided.stride[0] = 4;
  EXPECT_EQ(refused(strided), "tensor 'npy': expected contiguous elements");
}

TEST(NpyFaults, EveryTruncationIsRefused) {
  const std::string good = npy_bytes(header_of("<i4", "(2,)"), "12345678");
  ASSERT_EQ(fault(good), "no error");
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_THAT(fault(std::string_view(good).substr(0, size)), StartsWith("f: npy: ")) << size;
  }
  EXPECT_EQ(fault(good + "x"), "f: npy: expected 8 bytes of data, got 9");
}

TEST(NpyFaults, MagicVersionAndLength) {
  EXPECT_EQ(fault("not numpy at all"), "f: npy: not an npy file");
  EXPECT_EQ(fault(npy_bytes("{}", "", 4)), "f: npy: expected version 1.0, 2.0 or 3.0, got 4.0");
  std::string bytes = npy_bytes(header_of("|u1", "(1,)"), "x", 2);
  bytes.replace(8, 4, "\xff\xff\xff\xff");
  EXPECT_THAT(fault(bytes), HasSubstr("the header is said to be 4294967295 bytes long"));
}

TEST(NpyFaults, Header) {
  const auto header = [](std::string_view text) { return fault(npy_bytes(text, "x")); };
  EXPECT_THAT(header(header_of(">i4", "(1,)")), HasSubstr("got '>i4'"));
  EXPECT_THAT(header(header_of("<f8", "(1,)")), HasSubstr("expected dtype <f4"));
  EXPECT_THAT(header("{'descr': [('a', '<i4')], "), HasSubstr("structured dtypes"));
  EXPECT_THAT(header("{'descr': '|u1', 'fortran_order': True, 'shape': (1,)}"),
              HasSubstr("got Fortran order"));
  EXPECT_THAT(header("{'descr': '|u1', 'fortran_order': 0, 'shape': (1,)}"),
              HasSubstr("malformed header at '0, 'shape'"));
  EXPECT_THAT(header("{'descr': '|u1', 'shape': (1,)}"), HasSubstr("expected the header keys"));
  EXPECT_THAT(header("{'descr': '|u1', 'descr': '|u1'}"), HasSubstr("repeated header key 'descr'"));
  EXPECT_THAT(header("{'x': 1}"), HasSubstr("unknown or repeated header key 'x'"));
  EXPECT_THAT(header(header_of("|u1", "(1,)") + "x"), HasSubstr("malformed header at 'x'"));
  for (const char* shape :
       {"(1)", "1", "[1]", "(-1,)", "(1.0,)", "(1,,)", "(,)", "(1, 1", "(1 1)", "None", "(1L,)"}) {
    EXPECT_THAT(header(header_of("|u1", shape)), HasSubstr("malformed header")) << shape;
  }
  for (const char* text : {"", "{", "{'descr", "{'descr'", "{'descr':", "[]", "{,}"}) {
    EXPECT_THAT(header(text), StartsWith("f: npy: ")) << text;
  }
}

TEST(NpyFaults, SizesAndRank) {
  const auto shape = [](std::string_view text) {
    return fault(npy_bytes(header_of("<i8", text), "12345678"));
  };
  EXPECT_EQ(shape("(1, 1, 1, 1, 1, 1, 1, 1)"), "no error");
  EXPECT_EQ(shape("(1, 1, 1, 1, 1, 1, 1, 1, 1)"), "f: npy: expected at most 8 dimensions");
  for (const char* text :
       {"(9223372036854775808,)", "(99999999999999999999999,)", "(1152921504606846976,)",
        "(4294967296, 4294967296)", "(0, 4294967296, 4294967296)"}) {
    EXPECT_EQ(shape(text), "f: npy: size overflows 64 bits") << text;
  }
  EXPECT_EQ(shape("(1099511627776,)"), "f: npy: expected 8796093022208 bytes of data, got 8");
}

TEST(NpyFaults, Booleans) {
  EXPECT_EQ(fault(npy_bytes(header_of("|b1", "(2,)"), std::string_view("\1\2", 2))),
            "f: npy: expected BOOL bytes 0 and 1, got 2 at position 1");
}

}  // namespace
}  // namespace ehc::tables
