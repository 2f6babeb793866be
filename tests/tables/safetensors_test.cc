#include "tables/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/tables/table_test_support.h"

namespace ehc::tables {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string with_length(uint64_t length, std::string_view rest) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i));
  return bytes.append(rest);
}

std::string file_bytes(std::string_view header, std::string_view data) {
  return with_length(header.size(), std::string(header).append(data));
}

std::string fault(std::string_view bytes) {
  return error_text(ErrorKind::io, [&] { (void)SafetensorsFile::parse(bytes, "f"); });
}

std::string fault(std::string_view header, std::string_view data) {
  return fault(file_bytes(header, data));
}

bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) % kDataAlignment == 0;
}

// --- reading -------------------------------------------------------------------------------------

TEST(SafetensorsRead, TensorsAndMetadata) {
  const auto file = SafetensorsFile::parse(
      file_bytes(R"({"b":{"dtype":"I32","shape":[2,1],"data_offsets":[1,9]},)"
                 R"("__metadata__":{"format":"pt","empty":""},)"
                 R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   )",
                 std::string_view("\x07\x01\0\0\0\xff\xff\xff\xff", 9)),
      "f");
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"empty", ""}}));
  ASSERT_EQ(file.tensors().size(), 2u);
  const Tensor a = file.find("a");
  const Tensor b = file.find("b");
  EXPECT_EQ(a.dtype, DType::u8);
  EXPECT_EQ(a.as<uint8_t>()[0], 7);
  EXPECT_EQ(b.dtype, DType::i32);
  EXPECT_EQ(b.rank, 2);
  EXPECT_EQ(b.shape[0], 2);
  EXPECT_EQ(b.shape[1], 1);
  // At byte 1 of the data section, and yet usable as int32.
  EXPECT_TRUE(is_aligned(a) && is_aligned(b));
  EXPECT_EQ(b.as<int32_t>()[0], 1);
  EXPECT_EQ(b.as<int32_t>()[1], -1);
  EXPECT_FALSE(file.find("c").present());
}

TEST(SafetensorsRead, EmptyFilesScalarsAndZeroSizes) {
  EXPECT_TRUE(SafetensorsFile::parse(file_bytes("{}", ""), "f").tensors().empty());
  const auto file = SafetensorsFile::parse(
      file_bytes(R"({"scalar":{"dtype":"U8","shape":[],"data_offsets":[0,1]},)"
                 R"("none":{"dtype":"F32","shape":[3,0,5],"data_offsets":[1,1]}})",
                 "x"),
      "f");
  EXPECT_EQ(file.find("scalar").rank, 0);
  EXPECT_EQ(file.find("scalar").numel(), 1);
  EXPECT_EQ(file.find("none").numel(), 0);
  EXPECT_EQ(file.find("none").rank, 3);
}

TEST(SafetensorsRead, EveryDtype) {
  for (int i = 1; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::string header = R"({"t":{"dtype":")" + std::string(name_of(dtype)) +
                               R"(","shape":[1],"data_offsets":[0,)" +
                               std::to_string(size_of(dtype)) + "]}}";
    const auto file =
        SafetensorsFile::parse(file_bytes(header, std::string(size_of(dtype), '\1')), "f");
    EXPECT_EQ(file.find("t").dtype, dtype);
  }
}

TEST(SafetensorsRead, ViewsSurviveMoving) {
  auto file = SafetensorsFile::parse(
      file_bytes(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"), "f");
  const SafetensorsFile moved = std::move(file);
  EXPECT_EQ(*moved.find("t").as<char>(), 'x');
}

TEST(SafetensorsRead, HeaderOnlyGivesPositionsInTheFile) {
  const ScratchFolder folder;
  const std::string header = R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                             R"("s":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  write_bytes(folder.file("f"), file_bytes(header, "abc"));
  const InputFile file(folder.file("f"));
  const SafetensorsHeader parsed = read_safetensors_header(file);
  ASSERT_EQ(parsed.entries.size(), 2u);
  EXPECT_EQ(parsed.entries[1].name, "t");
  char bytes[2];
  file.read(parsed.data_start + parsed.entries[1].begin, bytes, 2);
  EXPECT_EQ(std::string_view(bytes, 2), "bc");
}

// --- faults --------------------------------------------------------------------------------------

constexpr const char* kGood = R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";

TEST(SafetensorsFaults, EveryTruncationIsRefused) {
  const std::string good = file_bytes(kGood, "ab");
  ASSERT_EQ(fault(good), "no error");
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_THAT(fault(std::string_view(good).substr(0, size)), StartsWith("f: ")) << size;
  }
  EXPECT_EQ(fault(good + "c"), "f: safetensors: expected 2 bytes of tensor data, got 3");
}

TEST(SafetensorsFaults, HeaderLength) {
  EXPECT_EQ(fault("1234567"), "f: safetensors: expected at least 8 bytes, got 7");
  EXPECT_EQ(fault(with_length(3, "{}")),
            "f: safetensors: the header is said to be 3 bytes long, the file has 10");
  EXPECT_THAT(fault(with_length(UINT64_MAX, "{}")), HasSubstr("18446744073709551615 bytes long"));
  EXPECT_THAT(fault(with_length(UINT64_MAX - 7, "{}")), HasSubstr("bytes long"));
}

TEST(SafetensorsFaults, HeaderIsNotOneObject) {
  for (const char* header : {"", "[]", "null", "1", "\"x\"", " {}", "\xef\xbb\xbf{}", "{", "{}{}",
                             "{},", "{}x", "{'a':1}", "{\"a\"}", "{\"a\":}", "{}/**/"}) {
    EXPECT_THAT(fault(header, ""), StartsWith("f: safetensors header: ")) << header;
  }
  EXPECT_EQ(fault(std::string_view("{}\0[[", 5), ""),
            "f: safetensors header: not valid JSON at byte 3");
  EXPECT_EQ(fault("{\"\xff\":1}", ""), "f: safetensors header: not valid JSON at byte 3");
}

TEST(SafetensorsFaults, DeepNestingCostsNoStack) {
  const std::string deep(4000000, '[');
  EXPECT_THAT(fault(R"({"t":)" + deep, ""), HasSubstr("expected an object, got an array"));
  EXPECT_THAT(fault(R"({"t":{"shape":)" + deep, ""), HasSubstr("expected integers, got an array"));
  std::string objects;
  for (int i = 0; i < 1000000; ++i) objects += R"({"a":)";
  EXPECT_THAT(fault(objects, ""), HasSubstr("unknown key 'a'"));
}

TEST(SafetensorsFaults, DuplicateNames) {
  EXPECT_EQ(fault(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                  R"("t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                  "ab"),
            "f: safetensors header: name 't' appears twice");
  EXPECT_EQ(fault(R"({"\u0074":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                  R"("t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                  "ab"),
            "f: safetensors header: name 't' appears twice");
  EXPECT_EQ(fault(R"({"__metadata__":{},"__metadata__":{}})", ""),
            "f: safetensors header: name '__metadata__' appears twice");
  EXPECT_EQ(fault(R"({"__metadata__":{"k":"1","k":"1"}})", ""),
            "f: safetensors header: metadata key 'k' appears twice");
  EXPECT_EQ(fault(R"({"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "a"),
            "f: safetensors header: tensor 't': key 'dtype' appears twice");
  EXPECT_THAT(fault(R"({"t":{"shape":[1],"shape":[1],"dtype":"U8","data_offsets":[0,1]}})", "a"),
              HasSubstr("key 'shape' appears twice"));
  EXPECT_THAT(fault(R"({"t":{"dtype":"U8","data_offsets":[0,1],"data_offsets":[0,1]}})", "a"),
              HasSubstr("key 'data_offsets' appears twice"));
}

TEST(SafetensorsFaults, Metadata) {
  EXPECT_EQ(fault(R"({"__metadata__":[]})", ""),
            "f: safetensors header: expected an object as __metadata__, got an array");
  EXPECT_EQ(fault(R"({"__metadata__":{"k":1}})", ""),
            "f: safetensors header: metadata 'k': expected a string, got a number");
  EXPECT_EQ(fault(R"({"__metadata__":{"k":{}}})", ""),
            "f: safetensors header: metadata 'k': expected a string, got an object");
}

TEST(SafetensorsFaults, EntryFields) {
  const auto entry = [](const std::string& fields) {
    const std::string text = fault("{\"t\":{" + fields + "}}", "ab");
    const std::string prefix = "f: safetensors header: tensor 't': ";
    EXPECT_THAT(text, StartsWith(prefix));
    return text.substr(std::min(prefix.size(), text.size()));
  };
  EXPECT_EQ(entry(R"("shape":[2],"data_offsets":[0,2])"), "no dtype");
  EXPECT_EQ(entry(R"("dtype":"U8","data_offsets":[0,2])"), "no shape");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[2])"), "no data_offsets");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[2],"data_offsets":[0,2],"x":1)"), "unknown key 'x'");
  for (const char* dtype : {"F64", "I8", "u8", "", "absent", "F8_E5M2", "U8 "}) {
    EXPECT_EQ(entry(R"("dtype":")" + std::string(dtype) + R"(","shape":[2],"data_offsets":[0,2])"),
              "unknown dtype '" + std::string(dtype) + "'");
  }
  EXPECT_EQ(entry(R"("dtype":8,"shape":[2],"data_offsets":[0,2])"),
            "expected a string as dtype, got a number");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":2,"data_offsets":[0,2])"),
            "expected an array as shape, got a number");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[null],"data_offsets":[0,2])"),
            "expected integers, got null");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[true],"data_offsets":[0,2])"),
            "expected integers, got a boolean");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[2],"data_offsets":"0,2")"),
            "expected an array as data_offsets, got a string");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[2],"data_offsets":[0])"),
            "expected two data_offsets, got 1");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[2],"data_offsets":[0,2,2])"),
            "expected two data_offsets, got more");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[2.0],"data_offsets":[0,2])"),
            "expected 64-bit integers, got '2.0'");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[-2],"data_offsets":[0,2])"), "negative number -2");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[2],"data_offsets":[-2,0])"), "negative number -2");
  EXPECT_EQ(entry(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,2])"),
            "expected at most 8 dimensions");
  EXPECT_EQ(fault(R"({"t":3})", ""),
            "f: safetensors header: tensor 't': expected an object, got a number");
}

TEST(SafetensorsFaults, SizesBeyond64Bits) {
  const auto shape = [](const std::string& dims) {
    return fault(R"({"t":{"dtype":"I64","shape":[)" + dims + R"(],"data_offsets":[0,2]}})", "ab");
  };
  for (const char* dims : {"18446744073709551615", "9223372036854775808", "9223372036854775807",
                           "4294967296,4294967296", "2305843009213693952,8",
                           "0,4294967296,4294967296", "4294967296,4294967296,0"}) {
    EXPECT_EQ(shape(dims), "f: safetensors header: tensor 't': size overflows 64 bits") << dims;
  }
  EXPECT_EQ(shape("18446744073709551616"),
            "f: safetensors header: tensor 't': expected 64-bit integers, got "
            "'18446744073709551616'");
  // The largest that fits is only too large for the file.
  EXPECT_THAT(shape("1152921504606846975"), HasSubstr("need 9223372036854775800 bytes"));
}

TEST(SafetensorsFaults, OffsetsMustMatchShapeAndEachOther) {
  const auto two = [](const std::string& a, const std::string& b) {
    return fault(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[)" + a +
                     R"(]},"b":{"dtype":"U8","shape":[2],"data_offsets":[)" + b + "]}}",
                 "abcd");
  };
  EXPECT_EQ(two("0,2", "2,4"), "no error");
  EXPECT_EQ(two("2,4", "0,2"), "no error");
  EXPECT_EQ(two("0,2", "1,3"),
            "f: safetensors header: tensor 'b' starts at byte 1, overlapping the one that ends at "
            "2");
  EXPECT_EQ(two("0,2", "0,2"),
            "f: safetensors header: tensor 'b' starts at byte 0, overlapping the one that ends at "
            "2");
  EXPECT_EQ(two("0,2", "3,5"),
            "f: safetensors header: tensor 'b' starts at byte 3, leaving a gap after 2");
  EXPECT_EQ(two("1,3", "3,5"),
            "f: safetensors header: tensor 'a' starts at byte 1, leaving a gap after 0");
  EXPECT_EQ(two("0,3", "3,4"),
            "f: safetensors header: tensor 'a': shape and dtype need 2 bytes, data_offsets are 0 "
            "and 3");
  EXPECT_THAT(two("2,0", "2,4"), HasSubstr("data_offsets are 2 and 0"));
  EXPECT_THAT(two("0,2", "18446744073709551614,18446744073709551615"), HasSubstr("need 2 bytes"));
  EXPECT_THAT(two("0,2", "18446744073709551613,18446744073709551615"), HasSubstr("leaving a gap"));
  // An empty tensor inside another one.
  EXPECT_THAT(fault(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                    R"("b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}})",
                    "ab"),
              HasSubstr("overlapping"));
}

TEST(SafetensorsFaults, HugeCountOfBytesIsNotAllocated) {
  EXPECT_EQ(
      fault(R"({"t":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}})",
            "ab"),
      "f: safetensors: expected 1099511627776 bytes of tensor data, got 2");
}

TEST(SafetensorsFaults, BooleansAreZeroOrOne) {
  const std::string header = R"({"m":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})";
  EXPECT_EQ(fault(header, std::string_view("\0\1\1", 3)), "no error");
  EXPECT_EQ(fault(header, std::string_view("\0\1\2", 3)),
            "f: safetensors: tensor 'm': expected BOOL bytes 0 and 1, got 2 at position 2");
}

TEST(SafetensorsFaults, NamesAreQuotedOnOneLine) {
  EXPECT_EQ(fault(R"({"a\nb\u00e9":1})", ""),
            "f: safetensors header: tensor 'a\\x0ab\\xc3\\xa9': expected an object, got a number");
  EXPECT_THAT(fault("{\"" + std::string(5000, 'n') + "\":1}", ""),
              HasSubstr("tensor '" + std::string(80, 'n') + "...'"));
}

// --- writing -------------------------------------------------------------------------------------

TEST(SafetensorsWrite, OrderAlignmentAndBytesAreDeterministic) {
  const uint8_t mask[3] = {1, 0, 1};
  const float values[2] = {1.5f, -0.0f};
  const int64_t big[1] = {-5};
  const std::vector<NamedTensor> tensors = {{"mask", {mask, DType::boolean, {3}}},
                                            {"z", {values, DType::f32, {2}}},
                                            {"a", {values, DType::f32, {2, 0}}},
                                            {"big", {big, DType::i64, {}}}};
  const std::vector<NamedTensor> reversed(tensors.rbegin(), tensors.rend());
  const Metadata metadata = {{"k", "v\n\"\xc3\xa9"}};
  const std::string bytes = format_safetensors(tensors, metadata);
  EXPECT_EQ(bytes, format_safetensors(reversed, metadata));

  const std::string expected_header =
      R"({"__metadata__":{"k":"v\n\")"
      "\xc3\xa9"
      R"("},"big":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"F32","shape":[2,0],"data_offsets":[8,8]},)"
      R"("z":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
      R"("mask":{"dtype":"BOOL","shape":[3],"data_offsets":[16,19]}})";
  const size_t header_size = bytes.size() - 8 - 19;
  EXPECT_EQ(header_size % 8, 0u);
  EXPECT_EQ(bytes.substr(0, 8), with_length(header_size, ""));
  EXPECT_THAT(bytes.substr(8, header_size), StartsWith(expected_header));
  EXPECT_EQ(bytes.substr(8 + expected_header.size(), header_size - expected_header.size())
                .find_first_not_of(' '),
            std::string::npos);

  const auto file = SafetensorsFile::parse(bytes, "f");
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(*file.find("big").as<int64_t>(), -5);
  EXPECT_EQ(std::memcmp(file.find("z").data, values, sizeof(values)), 0);
  EXPECT_EQ(file.find("a").shape[1], 0);
}

TEST(SafetensorsWrite, FileEqualsTheFormattedBytes) {
  const ScratchFolder folder;
  const float values[2] = {1, 2};
  const NamedTensor tensors[] = {{"x", {values, DType::f32, {2}}}};
  write_bytes(folder.file("out"), "old content");
  write_safetensors(folder.file("out"), tensors);
  EXPECT_EQ(read_bytes(folder.file("out")), format_safetensors(tensors));
  EXPECT_EQ(folder.entry_count(), 1u);
}

TEST(SafetensorsWrite, RefusesWhatCannotBeWritten) {
  const uint8_t bytes[8] = {1, 2};
  const auto refused = [](const std::vector<NamedTensor>& tensors, const Metadata& metadata = {}) {
    return error_text(ErrorKind::contract, [&] { (void)format_safetensors(tensors, metadata); });
  };
  Tensor transposed(bytes, DType::u8, {2, 4});
  std::swap(transposed.stride[0], transposed.stride[1]);
  const int64_t large[2] = {INT64_MAX, INT64_MAX};
  EXPECT_EQ(refused({{"x", {}}}), "tensor 'x': expected a tensor, got an absent one");
  EXPECT_EQ(refused({{"x", transposed}}), "tensor 'x': expected contiguous elements");
  EXPECT_EQ(refused({{"x", {bytes, DType::u8, {2}, Device::cuda}}}),
            "tensor 'x': expected host memory");
  EXPECT_EQ(refused({{"x", {nullptr, DType::u8, {2}}}}), "tensor 'x': expected data, got null");
  EXPECT_EQ(refused({{"x", {bytes, DType::u8, {-2}}}}), "tensor 'x': expected dimensions >= 0");
  EXPECT_EQ(refused({{"x", {bytes, DType::u8, {1, 1, 1, 1, 1, 1, 1, 1, 1}}}}),
            "tensor 'x': expected at most 8 dimensions");
  for (const DType dtype : {DType::u8, DType::i64}) {
    EXPECT_EQ(refused({{"x", {bytes, dtype, large, 2}}}), "tensor 'x': size overflows 64 bits");
  }
  EXPECT_EQ(refused({{"x", {bytes, DType::i64, large, 1}}}), "tensor 'x': size overflows 64 bits");
  EXPECT_EQ(refused({{"x", {bytes, DType::boolean, {2}}}}),
            "tensor 'x': expected BOOL bytes 0 and 1");
  EXPECT_EQ(refused({{"x", {bytes, DType::u8, {2}}}, {"x", {bytes, DType::u8, {1}}}}),
            "safetensors: name 'x' appears twice");
  EXPECT_EQ(refused({{"__metadata__", {bytes, DType::u8, {2}}}}),
            "safetensors: name '__metadata__' is reserved");
  EXPECT_EQ(refused({{"\xff", {bytes, DType::u8, {2}}}}),
            "safetensors: expected names and metadata in UTF-8");
  EXPECT_EQ(refused({}, {{"k", "\xc3"}}), "safetensors: expected names and metadata in UTF-8");
}

// --- golden files --------------------------------------------------------------------------------

TEST(SafetensorsGolden, EveryFileSurvivesReadWriteRead) {
  int count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(EHC_SOURCE_DIR) + "/tests/golden")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++count;
    const auto file = SafetensorsFile::open(entry.path());
    std::vector<NamedTensor> tensors;
    for (const auto& [name, tensor] : file.tensors()) tensors.push_back({name, tensor});
    const std::string bytes = format_safetensors(tensors, file.metadata());
    const auto again = SafetensorsFile::parse(bytes, entry.path());
    EXPECT_EQ(again.metadata(), file.metadata());
    ASSERT_EQ(again.tensors().size(), file.tensors().size());
    for (const auto& [name, tensor] : file.tensors()) {
      const Tensor other = again.find(name);
      ASSERT_EQ(other.dtype, tensor.dtype) << name;
      ASSERT_EQ(other.rank, tensor.rank) << name;
      EXPECT_TRUE(std::equal(tensor.shape, tensor.shape + kMaxRank, other.shape)) << name;
      EXPECT_TRUE(is_aligned(tensor)) << name;
      EXPECT_EQ(std::memcmp(other.data, tensor.data,
                            static_cast<size_t>(tensor.numel()) * size_of(tensor.dtype)),
                0)
          << entry.path() << name;
    }
  }
  EXPECT_GT(count, 100);
}

}  // namespace
}  // namespace ehc::tables
