#include "ehc/c_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/registry.h"
#include "ehc/version.h"
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif

namespace ehc {
namespace {

using ::testing::HasSubstr;

constexpr ehc_dtype kI32 = {0, 32, 1};
constexpr ehc_dtype kI64 = {0, 64, 1};

// A call of engram.hash, two tokens, one layer, two heads, that tests then break in one place.
struct HashCall {
  std::vector<int32_t> window{5, 3, 8, 5};
  std::vector<int64_t> multipliers{3, 5};
  std::vector<int32_t> sizes{7, 11};
  std::vector<int32_t> offsets{0, 7};
  std::vector<int32_t> indices = std::vector<int32_t>(4, -9);
  const int64_t square[2] = {2, 2};
  const int64_t row[2] = {1, 2};
  const int64_t cube[3] = {1, 1, 2};
  const int64_t out[3] = {1, 2, 2};
  ehc_tensor tensors[6] = {view(window.data(), kI32, 2, square),
                           view(multipliers.data(), kI64, 2, row),
                           view(sizes.data(), kI32, 3, cube),
                           view(offsets.data(), kI32, 2, row),
                           {},
                           view(indices.data(), kI32, 3, out)};
  std::vector<const ehc_tensor*> positions{&tensors[0], &tensors[1], &tensors[2],
                                           &tensors[3], nullptr,     &tensors[5]};
  std::vector<ehc_named_tensor> named;
  std::vector<ehc_attribute> attributes;
  const ehc_operator* op = ehc_op_find("engram.hash");
  ehc_context* context = nullptr;

  HashCall() { EXPECT_EQ(ehc_context_create_cpu(1, &context), EHC_OK); }
  ~HashCall() { ehc_context_destroy(context); }
  HashCall(const HashCall&) = delete;
  HashCall& operator=(const HashCall&) = delete;

  static ehc_tensor view(void* data, ehc_dtype dtype, int rank, const int64_t* shape) {
    return {data, {EHC_HOST, 0}, rank, dtype, shape, nullptr, 0};
  }
  [[nodiscard]] ehc_arguments arguments() const {
    return {positions.data(), positions.size(),  named.data(),
            named.size(),     attributes.data(), attributes.size()};
  }
  [[nodiscard]] ehc_status run() const {
    const ehc_arguments all = arguments();
    return ehc_run(context, op, &all);
  }
  // The call is refused with this text and leaves the output alone.
  void refused(const std::string& text) const {
    EXPECT_EQ(run(), EHC_CONTRACT) << text;
    EXPECT_THAT(ehc_last_error(), HasSubstr(text));
    EXPECT_EQ(indices, std::vector<int32_t>(4, -9)) << text;
  }
};

ehc_attribute text_attribute(const char* name, const char* text) {
  ehc_attribute a{};
  a.name = name;
  a.type = EHC_TEXT;
  a.text = text;
  return a;
}

const std::vector<int32_t> kRows{0, 7, 1, 8};  // 5*3^3*5 = 0 and 8*3^5*5 = 1, modulo 7 and 11

#if __has_include(<dlpack/dlpack.h>)
TEST(CApi, TensorHasTheLayoutOfDlpack) {
  static_assert(sizeof(ehc_tensor) == sizeof(DLTensor));
  static_assert(offsetof(ehc_tensor, data) == offsetof(DLTensor, data));
  static_assert(offsetof(ehc_tensor, device) == offsetof(DLTensor, device));
  static_assert(offsetof(ehc_tensor, ndim) == offsetof(DLTensor, ndim));
  static_assert(offsetof(ehc_tensor, dtype) == offsetof(DLTensor, dtype));
  static_assert(offsetof(ehc_tensor, shape) == offsetof(DLTensor, shape));
  static_assert(offsetof(ehc_tensor, strides) == offsetof(DLTensor, strides));
  static_assert(offsetof(ehc_tensor, byte_offset) == offsetof(DLTensor, byte_offset));
  EXPECT_EQ(int{EHC_HOST}, int{kDLCPU});
  HashCall c;
  std::vector<DLTensor> tensors;
  for (const ehc_tensor& t : c.tensors) {
    DLTensor dl{};
    dl.data = t.data;
    dl.device.device_type = kDLCPU;
    dl.ndim = t.ndim;
    dl.dtype = {t.dtype.code, t.dtype.bits, t.dtype.lanes};
    dl.shape = const_cast<int64_t*>(t.shape);
    tensors.push_back(dl);
  }
  for (size_t i = 0; i < 6; ++i) {
    if (i != 4) c.positions[i] = reinterpret_cast<const ehc_tensor*>(&tensors[i]);
  }
  EXPECT_EQ(c.run(), EHC_OK) << ehc_last_error();
  EXPECT_EQ(c.indices, kRows);
}
#endif

// A count that no table can need is refused before anything is read.
TEST(CApi, RefusesHugeCounts) {
  HashCall c;
  c.attributes.push_back(text_attribute("layout", "LTC"));
  ehc_arguments all = c.arguments();
  all.attribute_count = SIZE_MAX / 2;
  EXPECT_EQ(ehc_run(c.context, c.op, &all), EHC_CONTRACT);
  EXPECT_THAT(ehc_last_error(), HasSubstr("attributes: expected at most 2, got 92233720368547758"));
  all = c.arguments();
  const ehc_named_tensor named[1] = {{"window", 0, &c.tensors[0]}};
  all.named_tensors = named;
  all.named_tensor_count = size_t{1} << 50;
  EXPECT_EQ(ehc_run(c.context, c.op, &all), EHC_CONTRACT);
  EXPECT_THAT(ehc_last_error(),
              HasSubstr("named_tensors: expected at most 6, got 1125899906842624"));

  const int64_t one[1] = {1};
  for (const size_t count : {size_t{1} << 21, SIZE_MAX, SIZE_MAX / 8}) {
    ehc_attribute layers{};
    layers.name = "layer_ids";
    layers.type = EHC_INTEGERS;
    layers.integers = one;
    layers.count = count;
    const ehc_arguments arguments{nullptr, 0, nullptr, 0, &layers, 1};
    ehc_layout layouts[1];
    EXPECT_EQ(ehc_infer_outputs(ehc_op_find("engram.multipliers"), &arguments, layouts, 1),
              EHC_CONTRACT);
    EXPECT_EQ(std::string(ehc_last_error()),
              "engram.multipliers: attribute 'layer_ids': expected at most 1048576 integers, got " +
                  std::to_string(count));
  }
}

TEST(CApi, VersionIsThatOfTheHeaders) {
  EXPECT_EQ(ehc_version_number(), EHC_VERSION);
  EXPECT_STREQ(ehc_version(), EHC_VERSION_STRING);
}

TEST(CApi, EveryOperatorIsDescribedAsItsTableSays) {
  ASSERT_EQ(ehc_op_count(), all_operators().size());
  for (size_t k = 0; k < ehc_op_count(); ++k) {
    const Schema& schema = all_operators()[k]->schema;
    const ehc_operator* op = ehc_op_at(k);
    ASSERT_NE(op, nullptr);
    const ehc_op_info& info = *ehc_op_describe(op);
    EXPECT_EQ(info.name, schema.name);
    EXPECT_EQ(info.section, schema.section);
    EXPECT_EQ(ehc_op_find(info.name), op);
    ASSERT_EQ(info.tensor_count, schema.tensors.size());
    ASSERT_EQ(info.attribute_count, schema.attributes.size());
    ASSERT_EQ(info.implementation_count, all_operators()[k]->implementations.size());
    for (size_t i = 0; i < info.tensor_count; ++i) {
      const TensorSpec& spec = schema.tensors[i];
      const ehc_tensor_info& t = *ehc_op_tensor(op, i);
      EXPECT_EQ(t.name, spec.name);
      EXPECT_EQ(t.pattern, spec.pattern);
      EXPECT_EQ(t.condition, spec.condition_text);
      EXPECT_EQ(t.is_optional != 0, spec.is_optional);
      EXPECT_EQ(t.is_contiguous != 0, spec.is_packed);
      EXPECT_EQ(t.is_list != 0, spec.is_list);
      EXPECT_GT(t.dtype_count, 0U);
      const auto find = t.is_output != 0 ? ehc_op_output_position : ehc_op_input_position;
      EXPECT_EQ(find(op, t.name), static_cast<int32_t>(i)) << info.name << " " << t.name;
      if (!spec.alias.empty()) {
        ASSERT_GE(t.alias, 0);
        EXPECT_EQ(ehc_op_tensor(op, static_cast<size_t>(t.alias))->name, spec.alias);
      } else {
        EXPECT_EQ(t.alias, -1);
      }
    }
    for (size_t i = 0; i < info.attribute_count; ++i) {
      const ehc_attribute_info& a = *ehc_op_attribute(op, i);
      EXPECT_EQ(a.name, schema.attributes[i].name);
      EXPECT_EQ(a.choices, schema.attributes[i].choices);
      EXPECT_EQ(int{a.type}, static_cast<int>(schema.attributes[i].type));
      EXPECT_EQ(ehc_op_attribute_position(op, a.name), static_cast<int32_t>(i));
    }
    for (size_t i = 0; i < info.implementation_count; ++i) {
      const Implementation& impl = all_operators()[k]->implementations[i];
      EXPECT_EQ(ehc_op_implementation(op, i)->name, impl.name);
      EXPECT_EQ(ehc_op_implementation(op, i)->uses_workspace != 0, impl.workspace != nullptr);
    }
  }
}

TEST(CApi, TellsWhatTheBuildOffers) {
  const std::string info = ehc_build_info();
  EXPECT_THAT(info, HasSubstr("\"version\":\"" + std::string(ehc_version()) + "\""));
  EXPECT_THAT(info, HasSubstr("\"generic\""));
  EXPECT_EQ(ehc_build_info(), ehc_build_info());  // stays valid
  EXPECT_EQ(std::string(ehc_device_info()).front(), '[');
}

TEST(CApi, DescribesDefaultsAndTypes) {
  const ehc_operator* op = ehc_op_find("engram.hash");
  const ehc_attribute_info& layout =
      *ehc_op_attribute(op, static_cast<size_t>(ehc_op_attribute_position(op, "layout")));
  EXPECT_EQ(layout.type, EHC_CHOICE);
  EXPECT_STREQ(layout.choices, "LTC/TLC");
  EXPECT_EQ(layout.has_default, 1);
  EXPECT_EQ(layout.default_integer, 0);
  const ehc_tensor_info& offsets =
      *ehc_op_tensor(op, static_cast<size_t>(ehc_op_input_position(op, "offsets")));
  ASSERT_EQ(offsets.dtype_count, 2U);
  EXPECT_EQ(offsets.dtypes[0].bits, 64);
  EXPECT_EQ(offsets.dtypes[1].bits, 32);
}

TEST(CApi, UnknownNamesAndPositionsAreErrors) {
  EXPECT_EQ(ehc_op_find("engram.nothing"), nullptr);
  EXPECT_STREQ(ehc_last_error(), "unknown operator 'engram.nothing'");
  EXPECT_EQ(ehc_op_at(ehc_op_count()), nullptr);
  EXPECT_THAT(ehc_last_error(), HasSubstr("'position': expected less than"));
  const ehc_operator* op = ehc_op_find("engram.hash");
  EXPECT_EQ(ehc_op_tensor(op, 6), nullptr);
  EXPECT_EQ(ehc_op_attribute(op, SIZE_MAX), nullptr);
  EXPECT_EQ(ehc_op_implementation(op, 99), nullptr);
  EXPECT_EQ(ehc_op_input_position(op, "indices"), -1);
  EXPECT_STREQ(ehc_last_error(), "engram.hash: no input named 'indices'");
  EXPECT_EQ(ehc_op_output_position(op, "window"), -1);
  EXPECT_EQ(ehc_op_attribute_position(op, ""), -1);
}

TEST(CApi, NullNeverCrashes) {
  EXPECT_EQ(ehc_context_create_cpu(1, nullptr), EHC_CONTRACT);
  EXPECT_EQ(ehc_context_create_cuda(0, nullptr, nullptr), EHC_CONTRACT);
  ehc_context_destroy(nullptr);
  EXPECT_EQ(ehc_context_set_workspace(nullptr, nullptr, 0), EHC_CONTRACT);
  EXPECT_EQ(ehc_context_set_implementation(nullptr, "cpu"), EHC_CONTRACT);
  EXPECT_EQ(ehc_context_set_log(nullptr, nullptr, nullptr), EHC_CONTRACT);
  EXPECT_EQ(ehc_op_find(nullptr), nullptr);
  EXPECT_STREQ(ehc_last_error(),
               "ehc_op_find: argument 'name': expected an operator's name, got null");
  EXPECT_EQ(ehc_op_describe(nullptr), nullptr);
  EXPECT_EQ(ehc_op_tensor(nullptr, 0), nullptr);
  EXPECT_EQ(ehc_op_attribute(nullptr, 0), nullptr);
  EXPECT_EQ(ehc_op_implementation(nullptr, 0), nullptr);
  HashCall c;
  EXPECT_EQ(ehc_op_input_position(nullptr, "window"), -1);
  EXPECT_EQ(ehc_op_input_position(c.op, nullptr), -1);
  const ehc_arguments all = c.arguments();
  EXPECT_EQ(ehc_run(nullptr, c.op, &all), EHC_CONTRACT);
  EXPECT_EQ(ehc_run(c.context, nullptr, &all), EHC_CONTRACT);
  EXPECT_EQ(ehc_run(c.context, c.op, nullptr), EHC_CONTRACT);
  EXPECT_STREQ(ehc_last_error(), "ehc_run: argument 'arguments': expected arguments, got null");
  ehc_layout layouts[6];
  size_t bytes = 0;
  EXPECT_EQ(ehc_infer_outputs(nullptr, &all, layouts, 6), EHC_CONTRACT);
  EXPECT_EQ(ehc_infer_outputs(c.op, nullptr, layouts, 6), EHC_CONTRACT);
  EXPECT_EQ(ehc_infer_outputs(c.op, &all, nullptr, 6), EHC_CONTRACT);
  EXPECT_EQ(ehc_workspace_bytes(nullptr, c.op, &all, &bytes), EHC_CONTRACT);
  EXPECT_EQ(ehc_workspace_bytes(c.context, nullptr, &all, &bytes), EHC_CONTRACT);
  EXPECT_EQ(ehc_workspace_bytes(c.context, c.op, nullptr, &bytes), EHC_CONTRACT);
  EXPECT_EQ(ehc_workspace_bytes(c.context, c.op, &all, nullptr), EHC_CONTRACT);
  const ehc_arguments lies[] = {{nullptr, 6, nullptr, 0, nullptr, 0},
                                {nullptr, 0, nullptr, 1, nullptr, 0},
                                {nullptr, 0, nullptr, 0, nullptr, 1}};
  for (const ehc_arguments& lie : lies) EXPECT_EQ(ehc_run(c.context, c.op, &lie), EHC_CONTRACT);
  const ehc_arguments nothing{};
  EXPECT_EQ(ehc_run(c.context, c.op, &nothing), EHC_CONTRACT);
  EXPECT_THAT(ehc_last_error(), HasSubstr("tensor 'window': expected I32[T,Nmax], got none"));
}

TEST(CApi, RunsByPositionAndByName) {
  HashCall by_position;
  EXPECT_EQ(by_position.run(), EHC_OK) << ehc_last_error();
  EXPECT_EQ(by_position.indices, kRows);

  HashCall by_name;
  const char* names[] = {"window", "multipliers", "vocab_sizes", "offsets", "", "indices"};
  for (const int i : {5, 3, 1, 0, 2}) {
    by_name.named.push_back({names[i], i == 5, &by_name.tensors[i]});
  }
  by_name.named.push_back({"image_token_mask", 0, nullptr});
  by_name.positions.clear();
  EXPECT_EQ(by_name.run(), EHC_OK) << ehc_last_error();
  EXPECT_EQ(by_name.indices, kRows);

  HashCall unknown;
  unknown.named.push_back({"indices", 0, &unknown.tensors[5]});
  unknown.refused("tensor 'indices': expected inputs named window multipliers");
  unknown.named[0].name = nullptr;
  unknown.refused("'named_tensors': expected names, got null");
  HashCall many;
  many.positions.push_back(nullptr);
  many.refused("tensors: expected at most 6, got 7");
}

TEST(CApi, HonoursStridesByteOffsetAndPinnedMemory) {
  HashCall c;
  const std::vector<int32_t> wide{99, 5, 3, 99, 8, 5, 99};
  const int64_t strides[] = {3, 1};
  c.tensors[0].data = const_cast<int32_t*>(wide.data());
  c.tensors[0].byte_offset = sizeof(int32_t);
  c.tensors[0].strides = strides;
  c.tensors[0].device.type = EHC_CUDA_HOST;
  EXPECT_EQ(c.run(), EHC_OK) << ehc_last_error();
  EXPECT_EQ(c.indices, kRows);
}

TEST(CApi, RefusesTensorsItCannotTake) {
  {
    HashCall c;
    c.tensors[0].dtype.lanes = 4;
    c.refused(
        "engram.hash: tensor 'window': expected an element type of ehc_tensor with 1 lane, "
        "got code 0, 32 bits, 4 lanes");
  }
  {
    HashCall c;
    c.tensors[0].dtype = {5, 64, 1};
    c.refused("got code 5, 64 bits, 1 lanes");
  }
  {
    HashCall c;
    c.tensors[0].dtype = {2, 32, 1};
    c.refused("tensor 'window': expected I32[T,Nmax], got F32[2,2]");
  }
  for (const int type : {0, 4, 8, 13, -1}) {
    HashCall c;
    c.tensors[0].device.type = type;
    c.refused("tensor 'window': expected memory of device type 1 (host)");
  }
  {
    HashCall c;
    c.tensors[0].device = {EHC_CUDA, 0};
    c.refused("tensor 'window': expected memory on cpu, got cuda:0");
    c.tensors[0].device.id = 1 << 20;
    c.refused("device type 2, id 1048576");
  }
  for (const int rank : {-1, 9, INT32_MIN, INT32_MAX}) {
    HashCall c;
    c.tensors[0].ndim = rank;
    c.refused("tensor 'window': expected 0..8 dimensions, got " + std::to_string(rank));
  }
  {
    HashCall c;
    c.tensors[0].shape = nullptr;
    c.refused("tensor 'window': expected a pointer to the shape, got null");
  }
  {
    HashCall c;
    c.tensors[0].data = nullptr;
    c.tensors[0].byte_offset = 64;
    c.refused("tensor 'window': expected a pointer to data, got null");
  }
  {
    HashCall c;
    c.tensors[0].byte_offset = UINT64_MAX;
    c.refused("tensor 'window': expected data + byte_offset within the address space");
  }
  {
    HashCall c;
    const int64_t negative[] = {2, -2};
    c.tensors[0].shape = negative;
    c.refused("tensor 'window'");
  }
  {
    HashCall c;
    const int64_t huge[] = {INT64_MAX, 2};
    c.tensors[0].shape = huge;
    c.refused("tensor 'indices': expected I32[1,9223372036854775807,2]");
  }
}

TEST(CApi, TakesAttributesOfEveryForm) {
  HashCall c;
  const int64_t tokens_first[] = {2, 1, 2};
  c.tensors[5].shape = tokens_first;
  c.attributes.push_back(text_attribute("layout", "TLC"));
  EXPECT_EQ(c.run(), EHC_OK) << ehc_last_error();

  ehc_attribute choice{};
  choice.position = ehc_op_attribute_position(c.op, "layout");
  choice.type = EHC_CHOICE;
  choice.integer = 1;
  c.attributes = {choice};
  EXPECT_EQ(c.run(), EHC_OK) << ehc_last_error();
  EXPECT_EQ(c.indices, kRows);
}

TEST(CApi, RefusesAttributesItCannotTake) {
  const auto refused = [](const ehc_attribute& a, const std::string& text) {
    HashCall c;
    c.attributes.push_back(a);
    c.refused(text);
  };
  refused(text_attribute("layout", "XYZ"),
          "attribute 'layout': expected one of LTC/TLC, got 'XYZ'");
  refused(text_attribute("layout", nullptr), "attribute 'layout': expected a text, got null");
  refused(text_attribute("speed", "1"), "attribute 'speed': expected attributes named");
  ehc_attribute a{};
  for (const int32_t position : {-1, 2, INT32_MAX}) {
    a.position = position;
    refused(a, "attributes: expected positions below 2, got " + std::to_string(position));
  }
  a.name = "layout";
  for (const int32_t type :
       {int32_t{EHC_INTEGER}, int32_t{EHC_REAL}, int32_t{EHC_BOOLEAN}, int32_t{EHC_INTEGERS}}) {
    a.type = type;
    refused(a, "attribute 'layout': expected one of LTC/TLC");
  }
  for (const int32_t type : {-1, 6, INT32_MAX}) {
    a.type = type;
    refused(a, "attribute 'layout': expected an ehc_attribute_type");
  }
  a.type = EHC_CHOICE;
  for (const int64_t position : {int64_t{-1}, int64_t{2}, INT64_MAX}) {
    a.integer = position;
    refused(a, "expected one of LTC/TLC, got position " + std::to_string(position));
  }
  a.type = EHC_BOOLEAN;
  refused(a, "attribute 'layout': expected a boolean of 0 or 1");
  a.type = EHC_INTEGERS;
  a.count = 3;
  refused(a, "attribute 'layout': expected a pointer to integers, got null");
}

TEST(CApi, InfersOutputsBeforeThereIsMemory) {
  HashCall c;
  for (ehc_tensor& t : c.tensors) t.data = nullptr;
  c.positions[5] = nullptr;
  c.attributes = {text_attribute("index_dtype", "I64")};
  ehc_layout layouts[6];
  ehc_arguments all = c.arguments();
  ASSERT_EQ(ehc_infer_outputs(c.op, &all, layouts, 6), EHC_OK) << ehc_last_error();
  EXPECT_EQ(layouts[0].dtype.bits, 0);
  EXPECT_EQ(layouts[5].dtype.code, 0);
  EXPECT_EQ(layouts[5].dtype.bits, 64);
  EXPECT_EQ(layouts[5].dtype.lanes, 1);
  ASSERT_EQ(layouts[5].ndim, 3);
  EXPECT_EQ(std::vector<int64_t>(layouts[5].shape, layouts[5].shape + 3),
            (std::vector<int64_t>{1, 2, 2}));
  EXPECT_EQ(ehc_infer_outputs(c.op, &all, layouts, 5), EHC_CONTRACT);
  EXPECT_THAT(ehc_last_error(), HasSubstr("'layout_count': expected 6, got 5"));

  const int64_t empty[] = {0, 2};
  c.tensors[0].shape = empty;
  ASSERT_EQ(ehc_infer_outputs(c.op, &all, layouts, 6), EHC_OK) << ehc_last_error();
  EXPECT_EQ(layouts[5].shape[1], 0);
}

TEST(CApi, AnswersTheWorkspace) {
  HashCall c;
  size_t bytes = 1;
  const ehc_arguments all = c.arguments();
  EXPECT_EQ(ehc_workspace_bytes(c.context, c.op, &all, &bytes), EHC_OK) << ehc_last_error();
  EXPECT_EQ(bytes, 0U);
  std::vector<char> scratch(256);
  EXPECT_EQ(ehc_context_set_workspace(c.context, scratch.data(), scratch.size()), EHC_OK);
  EXPECT_EQ(ehc_context_set_workspace(c.context, nullptr, 0), EHC_OK);
}

TEST(CApi, LogsAndRestrictsTheImplementation) {
  HashCall c;
  std::vector<std::string> lines;
  const ehc_log log = [](void* user, const char* line) {
    static_cast<std::vector<std::string>*>(user)->emplace_back(line);
  };
  ASSERT_EQ(ehc_context_set_log(c.context, log, &lines), EHC_OK);
  ASSERT_EQ(ehc_context_set_implementation(c.context, "reference"), EHC_OK);
  EXPECT_EQ(c.run(), EHC_OK) << ehc_last_error();
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0], "engram.hash: reference");
  ASSERT_EQ(ehc_context_set_log(c.context, nullptr, nullptr), EHC_OK);
  ASSERT_EQ(ehc_context_set_implementation(c.context, "abacus"), EHC_OK);
  EXPECT_EQ(c.run(), EHC_UNAVAILABLE);
  EXPECT_THAT(ehc_last_error(), HasSubstr("implementation 'abacus': expected one of"));
  ASSERT_EQ(ehc_context_set_implementation(c.context, nullptr), EHC_OK);
  EXPECT_EQ(c.run(), EHC_OK);
  EXPECT_EQ(lines.size(), 1U);
}

TEST(CApi, ExceptionsDoNotCross) {
  HashCall c;
  const ehc_log standard = [](void*, const char*) { throw std::runtime_error("from the log"); };
  ASSERT_EQ(ehc_context_set_log(c.context, standard, nullptr), EHC_OK);
  EXPECT_EQ(c.run(), EHC_INTERNAL);
  EXPECT_STREQ(ehc_last_error(), "from the log");
  const ehc_log memory = [](void*, const char*) { throw std::bad_alloc(); };
  ASSERT_EQ(ehc_context_set_log(c.context, memory, nullptr), EHC_OK);
  EXPECT_EQ(c.run(), EHC_INTERNAL);
  EXPECT_STREQ(ehc_last_error(), "out of memory");
  const ehc_log number = [](void*, const char*) { throw 7; };
  ASSERT_EQ(ehc_context_set_log(c.context, number, nullptr), EHC_OK);
  EXPECT_EQ(c.run(), EHC_INTERNAL);
}

TEST(CApi, ErrorTextBelongsToTheThread) {
  EXPECT_EQ(ehc_op_find("here"), nullptr);
  std::string there = "unset";
  std::thread([&] {
    there = ehc_last_error();
    ehc_op_find("there");
  }).join();
  EXPECT_EQ(there, "");
  EXPECT_STREQ(ehc_last_error(), "unknown operator 'here'");
  const std::string longest(5000, 'x');
  EXPECT_EQ(ehc_op_find(longest.c_str()), nullptr);
  EXPECT_EQ(std::string(ehc_last_error()).size(), 1023U);
}

// The tensors of a list come by name; infer_outputs tells what each of them is.
TEST(CApi, ListsOfTensors) {
  const ehc_operator* op = ehc_op_find("mhc.multilayer_recompute");
  ASSERT_NE(op, nullptr);
  float x[1] = {2}, pre[2] = {3, 5}, y[1] = {7}, post[1] = {11}, comb[1] = {13};
  float layer_input[2] = {}, new_residual[1] = {};
  const int64_t ones[3] = {1, 1, 1};
  std::deque<ehc_tensor> tensors;
  std::vector<ehc_named_tensor> named;
  const auto give = [&](const char* name, int32_t is_output, float* data, int32_t rank) {
    ehc_tensor t{};
    t.data = data;
    t.device = {EHC_HOST, 0};
    t.ndim = rank;
    t.dtype = {2, 32, 1};
    t.shape = const_cast<int64_t*>(ones);
    named.push_back({name, is_output, &tensors.emplace_back(t)});
  };
  give("pre.1", 0, pre + 1, 2);
  give("pre.0", 0, pre, 2);
  give("residual", 0, x, 3);
  give("layer_output.0", 0, y, 2);
  give("post.0", 0, post, 2);
  give("comb.0", 0, comb, 3);
  ehc_arguments all{};
  all.named_tensors = named.data();
  all.named_tensor_count = named.size();
  std::vector<ehc_layout> layouts(ehc_op_describe(op)->tensor_count);
  ASSERT_EQ(ehc_infer_outputs(op, &all, layouts.data(), layouts.size()), EHC_OK)
      << ehc_last_error();
  EXPECT_EQ(layouts[static_cast<size_t>(ehc_op_output_position(op, "layer_input.L"))].ndim, 2);
  EXPECT_EQ(layouts[static_cast<size_t>(ehc_op_output_position(op, "new_residual.7"))].ndim, 3);

  give("layer_input.0", 1, layer_input, 2);
  give("layer_input.1", 1, layer_input + 1, 2);
  give("new_residual.0", 1, new_residual, 3);
  all.named_tensors = named.data();
  all.named_tensor_count = named.size();
  ehc_context* context = nullptr;
  ASSERT_EQ(ehc_context_create_cpu(1, &context), EHC_OK);
  EXPECT_EQ(ehc_run(context, op, &all), EHC_OK) << ehc_last_error();
  EXPECT_EQ(layer_input[0], 6);
  EXPECT_EQ(new_residual[0], 7 * 11 + 13 * 2);
  EXPECT_EQ(layer_input[1], 5 * new_residual[0]);

  const ehc_tensor* by_position[2] = {nullptr, &tensors[0]};
  all.tensors = by_position;
  all.tensor_count = 2;
  EXPECT_EQ(ehc_run(context, op, &all), EHC_CONTRACT);
  EXPECT_STREQ(ehc_last_error(),
               "mhc.multilayer_recompute: tensor 'pre.L': expected a list: named_tensors, 'pre.0' "
               "and so on, got a tensor by position");
  ehc_context_destroy(context);
}

TEST(CApi, RefusesContextsThatCannotBe) {
  ehc_context* context = reinterpret_cast<ehc_context*>(1);
  EXPECT_EQ(ehc_context_create_cpu(-1, &context), EHC_CONTRACT);
  EXPECT_EQ(context, nullptr);
  EXPECT_EQ(ehc_context_create_cpu(1 << 20, &context), EHC_CONTRACT);
  context = reinterpret_cast<ehc_context*>(1);
  EXPECT_EQ(ehc_context_create_cuda(1000, nullptr, &context), EHC_UNAVAILABLE);
  EXPECT_EQ(context, nullptr);
  EXPECT_THAT(ehc_last_error(), HasSubstr("cuda"));
}

}  // namespace
}  // namespace ehc
