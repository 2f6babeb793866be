// The one check of all operators' arguments: every message, strides, overlap, flattening.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "core/operator.h"
#include "ehc/error.h"
#include "tests/core/toy_operator.h"

namespace ehc {
namespace {

using toy::kOperator;
using toy::Toy;

std::string message_of(const std::function<void()>& body, ErrorKind kind = ErrorKind::contract) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  return "accepted";
}

// A legal call with T=3, n=2, d=4 that tests break in one place.
class FrontDoor : public testing::Test {
 protected:
  FrontDoor() {
    p.x = tensor({3, 2, 4});
    p.both = tensor({3, 3, 4});
    p.out = tensor({3, 2, 4});
    p.eps = 1e-6;
  }
  Tensor tensor(std::initializer_list<int64_t> shape, DType type = DType::f32) {
    Tensor t(nullptr, type, shape);
    memory.emplace_back(static_cast<size_t>(t.numel()) * 8 + 64);
    t.data = memory.back().data();
    return t;
  }
  std::string check(const AttributeValue* values = nullptr) {
    return message_of([&] { check_call(kOperator, {&p, values, &flat}, Device::cpu, 0); });
  }

  std::vector<std::vector<double>> memory;
  Toy p;
  Toy flat;  // p with its leading dimensions flattened
};

TEST_F(FrontDoor, AcceptsTheCallAndBindsItsSymbols) {
  const Bound bound = check_call(kOperator, {&p, nullptr, &flat}, Device::cpu, 0);
  EXPECT_EQ(bound["T"], 3);
  EXPECT_EQ(bound["n"], 2);
  EXPECT_EQ(bound["d"], 4);
  EXPECT_EQ(bound.activation, DType::f32);
}

TEST_F(FrontDoor, MissingTensors) {
  Toy whole = p;
  p.x = {};
  EXPECT_EQ(check(), "toy: tensor 'x': expected F32/F16/BF16[T,n,d], got none");
  p = whole;
  p.out = {};
  EXPECT_EQ(check(), "toy: tensor 'out': expected F32[3,2,4], got none");
}

TEST_F(FrontDoor, Dtypes) {
  p.x.dtype = DType::i32;
  EXPECT_EQ(check(), "toy: tensor 'x': expected F32/F16/BF16[T,n,d], got I32[3,2,4]");
  p.x.dtype = DType::bf16;
  EXPECT_EQ(check(), "toy: tensor 'both': expected BF16[3,3,4], got F32[3,3,4]");
  // Bit 33 of a set is not bit 1, that of F32.
  p.x.dtype = static_cast<DType>(32 + static_cast<int>(DType::f32));
  EXPECT_EQ(check(), "toy: tensor 'x': expected F32/F16/BF16[T,n,d], got unknown type[3,2,4]");
}

TEST_F(FrontDoor, ShapesAndRanks) {
  p.both.shape[1] = 4;
  EXPECT_EQ(check(), "toy: tensor 'both': expected F32[3,3,4], got F32[3,4,4]");
  p.both.shape[1] = 3;
  p.out.shape[2] = 5;
  EXPECT_EQ(check(), "toy: tensor 'out': expected F32[3,2,4], got F32[3,2,5]");
  p.out = tensor({3, 2, 4, 1});
  EXPECT_EQ(check(), "toy: tensor 'out': expected F32[3,2,4], got F32[3,2,4,1]");
  p.out = tensor({3, 8});
  EXPECT_EQ(check(), "toy: tensor 'out': expected F32[3,2,4], got F32[3,8]");
  p.x.rank = 9;
  EXPECT_EQ(check(), "toy: tensor 'x': expected F32[T,n,d], got rank 9");
  p.x.rank = -1;
  EXPECT_EQ(check(), "toy: tensor 'x': expected F32[T,n,d], got rank -1");
  p.x = tensor({4});
  EXPECT_EQ(check(), "toy: tensor 'x': expected F32[T,n,d], got F32[4]");
  p.x = tensor({3, 2, 4});
  p.x.shape[0] = -3;
  EXPECT_EQ(check(), "toy: tensor 'x': expected F32[T,n,d], got F32[-3,2,4]");
}

TEST_F(FrontDoor, SymbolRanges) {
  p.x = tensor({3, 9, 4});
  EXPECT_EQ(check(), "toy: tensor 'x': expected n in [1,8], got F32[3,9,4]");
  p.x = tensor({3, 0, 4});
  EXPECT_EQ(check(), "toy: tensor 'x': expected n in [1,8], got F32[3,0,4]");
  p.x = tensor({3, 2, 0});
  EXPECT_EQ(check(), "toy: tensor 'x': expected d >= 1, got F32[3,2,0]");
}

TEST_F(FrontDoor, ExpressionsAreSolvedBackwards) {
  p.dilation = 3;
  p.state = tensor({5, 6, 2, 4});
  p.state_out = tensor({5, 6, 2, 4});
  const Bound bound = check_call(kOperator, {&p, nullptr, &flat}, Device::cpu, 0);
  EXPECT_EQ(bound["w"], 3);
  EXPECT_EQ(bound["B"], 5);
  p.state = tensor({5, 7, 2, 4});
  EXPECT_EQ(check(), "toy: tensor 'state': expected F32[5,(w-1)*dilation,2,4], got F32[5,7,2,4]");
}

TEST_F(FrontDoor, Groups) {
  p.left = tensor({3, 2, 4});
  EXPECT_EQ(check(),
            "toy: tensor 'both': expected either side of 'both | left right', got 'both', 'left'");
  p.both = {};
  EXPECT_EQ(check(), "toy: tensor 'both': expected either side of 'both | left right', got 'left'");
  p.left = {};
  EXPECT_EQ(check(), "toy: tensor 'both': expected either side of 'both | left right', got none");
  p.left = tensor({3, 2, 4});
  p.right = tensor({3, 4});
  EXPECT_EQ(check(), "accepted");
  p.second = tensor({2});
  EXPECT_EQ(check(), "toy: tensor 'first': expected all or none of 'first second', got 'second'");
}

TEST_F(FrontDoor, Attributes) {
  p.eps.reset();
  EXPECT_EQ(check(), "toy: attribute 'eps': expected a value, got none");
  p.eps = 0;
  EXPECT_EQ(check(), "toy: attribute 'eps': expected a finite number > 0, got 0");
  p.eps = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(check(), "toy: attribute 'eps': expected a finite number > 0, got nan");
  p.eps = std::numeric_limits<double>::infinity();
  EXPECT_EQ(check(), "toy: attribute 'eps': expected a finite number > 0, got inf");
  p.eps = 1;
  p.count = 9;
  EXPECT_EQ(check(), "toy: attribute 'count': expected in [1,8], got 9");
  p.count = 2;
  const int64_t sizes[] = {3, 0};
  p.sizes = sizes;
  EXPECT_EQ(check(), "toy: attribute 'sizes': expected >= 1, got 0");
  p.sizes = {};
  p.table = tensor({1, 2}, DType::i32);
  p.rows = tensor({3}, DType::i32);
  EXPECT_EQ(check(), "toy: attribute 'rate': expected a value with 'table', got none");
  p.rate = -1;
  EXPECT_EQ(check(), "toy: attribute 'rate': expected a finite number >= 0, got -1");
  p.rate = 0;
  EXPECT_EQ(check(), "accepted");
}

// A C++ caller can put anything into an enum.
TEST_F(FrontDoor, EnumsBeyondTheirRange) {
  p.mode = static_cast<Toy::Mode>(2);
  EXPECT_EQ(check(), "toy: attribute 'mode': expected one of add/copy, got position 2");
  p.mode = static_cast<Toy::Mode>(-1);
  EXPECT_EQ(check(), "toy: attribute 'mode': expected one of add/copy, got position -1");
  p.mode = Toy::Mode::copy;
  EXPECT_EQ(check(), "accepted");
  p.both.device = static_cast<Device>(7);
  EXPECT_EQ(check(), "toy: tensor 'both': expected memory on cpu, got unknown device 7");
  p.both.device = Device::cpu;
  p.out.dtype = static_cast<DType>(200);
  EXPECT_EQ(check(), "toy: tensor 'out': expected F32[3,2,4], got unknown type[3,2,4]");
}

// Shortest text that reads back as the same number, so that it shows what was wrong.
TEST_F(FrontDoor, SmallNumbersAreShownWhole) {
  p.eps = -1e-20;
  EXPECT_EQ(check(), "toy: attribute 'eps': expected a finite number > 0, got -1e-20");
  p.eps = -0.1;
  EXPECT_EQ(check(), "toy: attribute 'eps': expected a finite number > 0, got -0.1");
  p.eps = -1.0 / 3;
  EXPECT_EQ(check(), "toy: attribute 'eps': expected a finite number > 0, got -0.3333333333333333");
}

TEST_F(FrontDoor, ConditionsOfOutputs) {
  p.rows = tensor({3}, DType::i32);
  EXPECT_EQ(check(),
            "toy: tensor 'rows': expected no such output here (it needs table), got I32[3]");
  p.rows = {};
  p.norm = tensor({3, 2});
  EXPECT_EQ(check(), "accepted") << "a C++ caller says 'save' by the tensor";
  // A call by name says it by the attribute.
  AttributeValue values[9];
  for (size_t i = 0; i < std::size(values); ++i) {
    values[i] = kOperator.schema.attributes[i].call_default;
  }
  EXPECT_EQ(check(values),
            "toy: tensor 'norm': expected no such output here (it needs save), got F32[3,2]");
  values[static_cast<size_t>(kOperator.schema.attribute_index("save"))].integer = 1;
  EXPECT_EQ(check(values), "accepted");
  p.norm = {};
  EXPECT_EQ(check(values), "toy: tensor 'norm': expected F32[3,2], got none");
}

TEST_F(FrontDoor, DevicesAndPointers) {
  p.both.device = Device::cuda;
  EXPECT_EQ(check(), "toy: tensor 'both': expected memory on cpu, got cuda:0");
  p.both.device = Device::cpu;
  p.x.data = nullptr;
  EXPECT_EQ(check(), "toy: tensor 'x': expected a pointer to data, got null");
  p.x.data = memory[0].data();
  p.out.data = p.out.as<char>() + 2;
  EXPECT_EQ(
      check(),
      "toy: tensor 'out': expected an address that is a multiple of 4, got address mod 4 = 2");
  p.out.data = p.out.as<char>() + 2;
  EXPECT_EQ(check(), "accepted") << "one element off is aligned to the element";
}

TEST_F(FrontDoor, EmptyTensorsMayHaveNoPointer) {
  p.x = Tensor(nullptr, DType::f32, {0, 2, 4});
  p.both = Tensor(nullptr, DType::f32, {0, 3, 4});
  p.out = Tensor(nullptr, DType::f32, {0, 2, 4});
  EXPECT_EQ(check(), "accepted");
}

TEST_F(FrontDoor, Strides) {
  p.x.stride[2] = 2;
  EXPECT_EQ(check(), "toy: tensor 'x': expected stride 1 in the last dimension, got 2");
  p.x.stride[2] = 1;
  p.x.stride[0] = -8;
  EXPECT_EQ(check(), "toy: tensor 'x': expected strides >= 0, got -8 at dimension 0");
  p.x.stride[0] = 0;
  EXPECT_EQ(check(), "accepted") << "an input may repeat a row";
  p.x.stride[0] = INT64_MAX / 2;
  EXPECT_THAT(check(), testing::StartsWith(
                           "toy: tensor 'x': expected an extent below 2^59 elements, got stride"));
  p.x.stride[0] = 8;
  p.out.stride[0] = 7;
  EXPECT_EQ(check(),
            "toy: tensor 'out': expected an output without overlapping elements, got stride 7 at "
            "dimension 0");
  p.out = tensor({2, 3, 8});  // the same elements with streams outermost
  p.out.shape[0] = 3;
  p.out.shape[1] = 2;
  p.out.shape[2] = 4;
  p.out.stride[0] = 4;
  p.out.stride[1] = 12;
  EXPECT_EQ(check(), "accepted") << "axes of an output come in any order";
  p.out = tensor({3, 2, 4});
  p.table = tensor({4, 4}, DType::i32);
  p.table.shape[0] = p.table.shape[1] = 2;
  p.rows = tensor({3}, DType::i32);
  p.rate = 1;
  EXPECT_EQ(check(),
            "toy: tensor 'table': expected a contiguous tensor, got stride 4 at dimension 0");
}

TEST_F(FrontDoor, OverlappingMemory) {
  p.out.data = p.x.as<float>() + 1;
  memory[0].resize(100);
  p.x.data = memory[0].data();
  p.out.data = p.x.as<float>() + 1;
  EXPECT_EQ(check(),
            "toy: tensor 'out': expected memory apart from 'x' or exactly the same view, got "
            "overlapping memory");
  p.out = p.x;
  EXPECT_EQ(check(), "accepted") << "in place";
  p.out.stride[0] = 16;
  EXPECT_THAT(check(), testing::HasSubstr("exactly the same view")) << "same pointer, other view";
  p.out = tensor({3, 2, 4});
  p.both.data = p.out.as<float>() + 23;
  EXPECT_EQ(check(),
            "toy: tensor 'out': expected memory apart from 'both', got overlapping memory");
  p.both = tensor({3, 3, 4});
  p.norm = tensor({3, 2});
  p.norm.data = p.out.data;
  EXPECT_EQ(check(),
            "toy: tensor 'out': expected memory apart from 'norm', got overlapping memory");
  p.both = {};
  p.norm = {};
  p.left = p.x;
  p.right = p.x.select(1, 0);
  EXPECT_EQ(check(), "accepted") << "inputs may overlap";
}

// Rows of one buffer that interleave share no element.
TEST_F(FrontDoor, InterleavedViewsAreApart) {
  const Tensor packed = tensor({3, 5, 4});
  p.x = packed.slice(1, 0, 2);
  p.out = packed.slice(1, 3, 5);
  EXPECT_EQ(check(), "accepted");
  p.out = packed.slice(1, 1, 3);
  EXPECT_THAT(check(), testing::HasSubstr("memory apart from 'x'"));
}

TEST_F(FrontDoor, LeadingDimensionsFlatten) {
  p.x = tensor({2, 3, 2, 4});
  p.both = tensor({2, 3, 3, 4});
  p.out = tensor({2, 3, 2, 4});
  const Bound bound = check_call(kOperator, {&p, nullptr, &flat}, Device::cpu, 0);
  EXPECT_EQ(bound["T"], 6);
  EXPECT_EQ(flat.x.rank, 3);
  EXPECT_EQ(flat.x.shape[0], 6);
  EXPECT_EQ(flat.x.stride[0], 8);
  p.out = tensor({3, 2, 2, 4});
  EXPECT_EQ(check(), "toy: tensor 'out': expected F32[2,3,2,4], got F32[3,2,2,4]");
  p.out = tensor({6, 2, 4});
  EXPECT_EQ(check(), "toy: tensor 'out': expected F32[2,3,2,4], got F32[6,2,4]");
  p.out = tensor({4, 3, 2, 4});
  p.out.shape[0] = 2;
  p.out.stride[0] = 48;
  EXPECT_EQ(check(),
            "toy: tensor 'out': expected leading dimensions that flatten to one stride, got stride "
            "48 at dimension 0");
  p.x.shape[0] = p.x.shape[1] = INT64_MAX / 2;
  EXPECT_THAT(check(), testing::StartsWith("toy: tensor 'x': expected F32")) << "T overflows";
}

TEST(Operator, NamesOfImplementations) {
  EXPECT_TRUE(names_implementation("", "cpu.avx2"));
  EXPECT_TRUE(names_implementation("cpu", "cpu.avx2"));
  EXPECT_TRUE(names_implementation("cpu.avx2", "cpu.avx2"));
  EXPECT_FALSE(names_implementation("cpu.avx", "cpu.avx2"));
  EXPECT_FALSE(names_implementation("cuda", "cpu"));
}

TEST_F(FrontDoor, ChoiceOfImplementation) {
  Context context = Context::cpu(1);
  std::string log;
  context.set_log([&](std::string_view line) { log = line; });
  const auto call = [&](const Toy& params) { invoke(kOperator, context, params); };
  call(p);
  EXPECT_EQ(log, "toy: cpu.narrow");
  p.x = tensor({3, 2, 5});
  p.both = tensor({3, 3, 5});
  p.out = tensor({3, 2, 5});
  EXPECT_EQ(message_of([&] { call(p); }), "toy: workspace: expected at least 48 bytes, got 0");
  EXPECT_EQ(plan(kOperator, context, p).workspace_bytes, 48U);
  std::vector<char> scratch(48);
  context.set_workspace(scratch.data(), scratch.size());
  call(p);
  EXPECT_EQ(log, "toy: cpu.scratch; cpu.narrow refused: d > 4");
  context.set_implementation("reference");
  call(p);
  EXPECT_EQ(log, "toy: reference");
  context.set_implementation("cpu.narrow");
  EXPECT_EQ(message_of([&] { call(p); }, ErrorKind::unavailable),
            "toy: no implementation on cpu takes this call; cpu.narrow refused: d > 4");
  context.set_implementation("cpu");
  call(p);
  EXPECT_EQ(log, "toy: cpu.scratch; cpu.narrow refused: d > 4") << "a family";
  context.set_implementation("cpu.nar");
  EXPECT_EQ(message_of([&] { call(p); }, ErrorKind::unavailable),
            "toy: implementation 'cpu.nar': expected one of cpu.narrow cpu.scratch reference, got "
            "'cpu.nar'");
}

TEST_F(FrontDoor, AWholeNameIsNotAFamily) {
  std::vector<Implementation> list(kOperator.implementations.begin(),
                                   kOperator.implementations.end());
  list.back().name = "cpu";
  Operator op = kOperator;
  op.implementations = list;
  Context context = Context::cpu(1);
  EXPECT_EQ(plan(op, context, p).implementation, "cpu.narrow");
  context.set_implementation("cpu");
  EXPECT_EQ(plan(op, context, p).implementation, "cpu");
}

TEST_F(FrontDoor, PlansWithoutRunning) {
  Context context = Context::cpu(1);
  p.x = tensor({3, 2, 5});
  p.both = tensor({3, 3, 5});
  p.out = tensor({3, 2, 5});
  p.out.as<float>()[0] = 7;
  p.x.as<float>()[0] = 1;
  const Plan found = plan(kOperator, context, p);
  EXPECT_EQ(found.implementation, "cpu.scratch");
  ASSERT_EQ(found.refused.size(), 1U);
  EXPECT_EQ(found.refused[0].implementation, "cpu.narrow");
  EXPECT_EQ(found.refused[0].reason, "d > 4");
  EXPECT_EQ(found.workspace_bytes, 48U);
  EXPECT_EQ(p.out.as<float>()[0], 7);
  context.set_implementation("cpu.narrow");
  EXPECT_EQ(message_of([&] { plan(kOperator, context, p); }, ErrorKind::unavailable),
            "toy: no implementation on cpu takes this call; cpu.narrow refused: d > 4");
  p.eps = 0;
  EXPECT_THAT(message_of([&] { plan(kOperator, context, p); }), testing::HasSubstr("'eps'"));
}

TEST_F(FrontDoor, WorkspaceLiesApartFromTensors) {
  Context context = Context::cpu(1);
  context.set_implementation("cpu.scratch");
  const auto call = [&] { return message_of([&] { invoke(kOperator, context, p); }); };
  const auto overlaps = [](const char* name) {
    return "toy: workspace: expected memory apart from '" + std::string(name) +
           "', got overlapping memory";
  };
  std::vector<char> scratch(256);
  context.set_workspace(scratch.data(), scratch.size());
  EXPECT_EQ(call(), "accepted");
  context.set_workspace(p.out.data, 48);
  EXPECT_EQ(call(), overlaps("out"));
  context.set_workspace(p.x.as<char>() + 95, 48);
  EXPECT_EQ(call(), overlaps("x")) << "its last byte";
  context.set_workspace(p.both.as<char>() - 47, 48);
  EXPECT_EQ(call(), overlaps("both")) << "its first byte";
  context.set_workspace(p.x.as<char>() + 96, 48);
  EXPECT_EQ(call(), "accepted") << "right behind it";
  context.set_implementation("reference");
  context.set_workspace(p.out.data, 48);
  EXPECT_EQ(call(), "accepted") << "what needs no workspace does not touch it";
}

TEST_F(FrontDoor, RunsInAnyLayoutOfTheTable) {
  Context context = Context::cpu(2);
  for (int i = 0; i < 24; ++i) p.x.as<float>()[i] = static_cast<float>(i);
  invoke(kOperator, context, p);
  for (int i = 0; i < 24; ++i) ASSERT_EQ(p.out.as<float>()[i], 2.0F * static_cast<float>(i));
  EXPECT_EQ(p.x.rank, 3) << "the caller's struct stays as it is";
}

}  // namespace
}  // namespace ehc
