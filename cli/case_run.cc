#include "cli/case_run.h"

#include <algorithm>
#include <cstring>

#include "cli/integers.h"
#include "core/cuda_graph.h"
#include "core/cuda_support.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

constexpr size_t kGuard = 256;  // bytes on either side of a tensor

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Bytes between host memory and a place in a buffer. What is copied out is there on return.
void copy_in(const Context& context, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (context.device() == Device::cpu) {
    std::memcpy(to, from, bytes);
  } else {
    cuda_support::start_copy_to_device(context.device_index(), context.stream(), to, from, bytes);
  }
}
void copy_out(const Context& context, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (context.device() == Device::cpu) {
    std::memcpy(to, from, bytes);
  } else {
    cuda_support::copy_to_host(context.device_index(), context.stream(), to, from, bytes);
  }
}

// The view's strides, and the elements from its first to its last.
int64_t stride_rows(Tensor& t, Layout layout, bool packed, int lead_rank) {
  int64_t step = 1;
  const bool gaps = !packed && (layout == Layout::strided || layout == Layout::padded);
  const auto line = static_cast<int64_t>(64 / size_of(t.dtype));
  for (int k = t.rank - 1; k >= 0; --k) {
    t.stride[k] = step;
    step *= t.shape[k] > 1 ? t.shape[k] : 1;
    if (!gaps || k < lead_rank) continue;  // leading dimensions flatten to one stride
    const bool row = k == t.rank - 1;
    if (layout == Layout::strided) step += row ? 3 : 5;
    if (layout == Layout::padded) step = round_up(step, line) + line;
  }
  return t.numel() == 0 ? 0 : step;
}

bool same_view_shape(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int k = 0; k < a.rank; ++k) {
    if (a.shape[k] != b.shape[k]) return false;
  }
  return true;
}

}  // namespace

constexpr std::string_view kLayoutNames[] = {"contiguous", "strided", "padded", "misaligned",
                                             "aliased",    "bare",    "far"};

std::string_view name_of(Layout layout) { return kLayoutNames[static_cast<size_t>(layout)]; }

std::optional<Layout> layout_from_name(std::string_view name) {
  for (size_t i = 0; i < std::size(kLayoutNames); ++i) {
    if (kLayoutNames[i] == name) return static_cast<Layout>(i);
  }
  return std::nullopt;
}

PlacedTensor::PlacedTensor(const Tensor& like, Layout layout, bool packed, int lead_rank,
                           unsigned char poison)
    : image_(like), view_(like) {
  const size_t size = size_of(like.dtype);
  const int64_t span = stride_rows(view_, layout, packed, lead_rank);
  for (int k = 0; k < view_.rank; ++k) image_.stride[k] = view_.stride[k];
  const size_t guard = layout == Layout::bare ? 0 : kGuard;
  offset_ = guard + (layout == Layout::misaligned ? size : 0);
  if (layout == Layout::far && !packed && like.rank > 1 && like.shape[0] > 1 && like.numel() > 0) {
    pieces_ = like.shape[0];
    const int64_t token = like.numel() / pieces_;
    const auto room = static_cast<int64_t>(2 * kGuard / size);
    // Whole guards apart, and the last token beyond 2^31.
    const int64_t step = round_up(
        std::max((int64_t{1} << 31) / (pieces_ - 1) + 1, round_up(token, room) + room), room);
    piece_bytes_ = offset_ + static_cast<size_t>(token) * size + guard;
    piece_bytes_ = static_cast<size_t>(round_up(static_cast<int64_t>(piece_bytes_), 16));
    piece_step_ = static_cast<size_t>(step) * size;
    image_.stride[0] = static_cast<int64_t>(piece_bytes_ / size);
    view_.stride[0] = step;
  } else {
    piece_bytes_ = offset_ + static_cast<size_t>(span) * size + guard;
  }
  has_original_ = layout != Layout::bare || like.data != nullptr;
  original_.assign(static_cast<size_t>(pieces_) * piece_bytes_, std::byte{poison});
  if (like.data == nullptr) return;
  const auto* from = like.as<std::byte>();
  for_each_row(image_, [&](size_t at, size_t source, size_t bytes) {
    std::memcpy(original_.data() + offset_ + at, from + source, bytes);
  });
}

void PlacedTensor::set_memory(const Context& context, void* memory) {
  view_.data = static_cast<std::byte*>(memory) + offset_;
  view_.device = context.device();
  view_.device_index = static_cast<int8_t>(context.device_index());
}

PlacedTensor::Now PlacedTensor::now(std::span<std::byte> image) const {
  Now now;
  now.elements.resize(bytes_of(view_));
  const auto is_original = [&] {
    return std::memcmp(image.data(), original_.data(), original_.size()) == 0;
  };
  const bool same = is_original();
  now.same_elements = true;
  for_each_row(image_, [&](size_t at, size_t to, size_t bytes) {
    std::byte* here = image.data() + offset_ + at;
    const std::byte* placed = original_.data() + offset_ + at;
    std::memcpy(now.elements.data() + to, here, bytes);
    if (same) return;
    now.same_elements = now.same_elements && std::memcmp(here, placed, bytes) == 0;
    std::memcpy(here, placed, bytes);
  });
  now.same_surroundings = same || is_original();
  return now;
}

PlacedCase::PlacedCase(const CaseInputs& inputs, const std::vector<Tensor>& tensors,
                       Context& context, const RunOptions& options)
    : inputs_(inputs),
      tensors_(tensors),
      context_(context),
      options_(options),
      call_(inputs.op()),
      home_(tensors.size(), -1),
      at_(tensors.size(), -1),
      is_written_(tensors.size()) {
  inputs.prepare(call_);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!call_.spec_of(i).is_output) call_.tensor(i) = tensors[i];
  }
  made_ = call_.outputs();
  choose_homes();
  if (options.layout == Layout::aliased && !aliased_) {
    refusal_ = "no output may share an input's memory";
    return;
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& spec = call_.spec_of(i);
    if (!spec.is_output && tensors[i].present()) place(i, tensors[i]);
    if (!spec.is_output || !made_[i].present()) continue;
    if (home_[i] < 0) {
      place(i, made_[i]);
    } else {
      at_[i] = at_[static_cast<size_t>(home_[i])];
    }
    is_written_[static_cast<size_t>(at_[i])] = true;
  }
  allocate();
  upload();
  borrow_workspace();
}

// Which output lives in which input's memory.
void PlacedCase::choose_homes() {
  for (const auto& [output, input] : call_.shared_memory()) {
    if (made_[output].present()) home_[output] = static_cast<int>(input);
  }
  for (size_t i = 0; i < tensors_.size() && options_.layout == Layout::aliased; ++i) {
    const int alias = call_.spec_of(i).alias_index;
    if (!made_[i].present() || alias < 0 || home_[i] >= 0) continue;
    const size_t input = call_.slot_at(static_cast<size_t>(alias));
    if (!same_view_shape(made_[i], tensors_[input])) continue;
    home_[i] = static_cast<int>(input);
    aliased_ = true;
  }
}

void PlacedCase::place(size_t slot, const Tensor& like) {
  const TensorSpec& spec = call_.spec_of(slot);
  const bool leads = spec.shape.leads_with_tokens();
  Layout layout = options_.layout;
  if (layout == Layout::far && (!leads || inputs_.lead_rank() > 1)) layout = Layout::contiguous;
  at_[slot] = static_cast<int>(placed_.size());
  placed_.emplace_back(like, layout, spec.is_packed,
                       leads && call_.schema().flattens ? inputs_.lead_rank() : 1, options_.poison);
}

bool PlacedCase::lies_apart() const {
  return options_.layout == Layout::bare || options_.layout == Layout::far;
}

void PlacedCase::allocate() {
  size_t images = 0;
  for (const PlacedTensor& p : placed_) {
    image_at_.push_back(images);
    images += static_cast<size_t>(round_up(static_cast<int64_t>(p.original().size()), kGuard));
  }
  image_at_.push_back(images);
  const bool apart = lies_apart();
  if (!apart) memory_.emplace_back(context_, images, false);
  for (size_t i = 0; i < placed_.size(); ++i) {
    if (apart) memory_.emplace_back(context_, placed_[i].bytes(), true);
    auto* memory = static_cast<std::byte*>(memory_.back().data());
    placed_[i].set_memory(context_, apart ? memory : memory + image_at_[i]);
  }
  for (size_t i = 0; i < at_.size(); ++i) {
    if (at_[i] >= 0) call_.tensor(i) = placed_[static_cast<size_t>(at_[i])].view();
  }
}

void PlacedCase::upload() {
  if (lies_apart()) {
    for (size_t i = 0; i < placed_.size(); ++i) {
      if (!placed_[i].has_original()) continue;
      auto* memory = static_cast<std::byte*>(memory_[i].data());
      placed_[i].for_each_piece([&](size_t at, size_t from, size_t bytes) {
        copy_in(context_, memory + at, placed_[i].original().data() + from, bytes);
      });
    }
    return;
  }
  std::vector<std::byte> images(image_at_.back());
  for (size_t i = 0; i < placed_.size(); ++i) {
    std::ranges::copy(placed_[i].original(), images.begin() + static_cast<ptrdiff_t>(image_at_[i]));
  }
  copy_in(context_, memory_.front().data(), images.data(), images.size());
}

std::vector<std::byte> PlacedCase::download() const {
  std::vector<std::byte> images(image_at_.back());
  if (lies_apart()) {
    for (size_t i = 0; i < placed_.size(); ++i) {
      const auto* memory = static_cast<const std::byte*>(memory_[i].data());
      placed_[i].for_each_piece([&](size_t at, size_t to, size_t bytes) {
        copy_out(context_, images.data() + image_at_[i] + to, memory + at, bytes);
      });
    }
  } else {
    copy_out(context_, images.data(), memory_.front().data(), images.size());
  }
  return images;
}

void PlacedCase::borrow_workspace() {
  context_.set_implementation(options_.implementation);
  try {
    workspace_ = CaseMemory(context_, call_.plan(context_).workspace_bytes, lies_apart());
  } catch (const Error& e) {
    synchronize(context_);  // others get the memory
    // An operator may forbid sharing in some modes (in place with saved statistics).
    if (e.kind() != ErrorKind::unavailable && !aliased_) throw;
    refusal_ = e.what();
  }
}

void PlacedCase::run() {
  start();
  synchronize(context_);
}

void PlacedCase::start() {
  context_.set_implementation(options_.implementation);
  context_.set_workspace(workspace_.data(), workspace_.bytes());
  if (options_.captured) {
    const cuda_graph::Graph graph(context_.device_index(), context_.stream(),
                                  [&] { call_.run(context_); });
    graph.launch();
    synchronize(context_);  // as long as the graph lives
  } else {
    call_.run(context_);
  }
  context_.set_workspace(nullptr, 0);
}

int64_t PlacedCase::count_differing_repeats(int times) {
  const int device = context_.device_index();
  std::vector<CaseMemory> before, after;
  for (const CaseMemory& memory : memory_) {
    before.emplace_back(context_, memory.bytes(), false);
    after.emplace_back(context_, memory.bytes(), false);
    cuda_support::copy_within_device(device, context_.stream(), after.back().data(), memory.data(),
                                     memory.bytes());
  }
  const auto for_each_area = [&](const auto& body) {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (memory_[i].bytes() > 0) body(i, memory_[i].data(), memory_[i].bytes());
    }
  };
  upload();
  for_each_area([&](size_t i, void* memory, size_t bytes) {
    cuda_support::copy_within_device(device, context_.stream(), before[i].data(), memory, bytes);
  });
  unsigned different = 0;
  const CaseMemory count(context_, sizeof different, false);
  copy_in(context_, count.data(), &different, sizeof different);
  context_.set_implementation(options_.implementation);
  context_.set_workspace(workspace_.data(), workspace_.bytes());
  for (int i = 0; i < times; ++i) {
    for_each_area([&](size_t k, void* memory, size_t bytes) {
      cuda_support::copy_within_device(device, context_.stream(), memory, before[k].data(), bytes);
    });
    call_.run(context_);
    for_each_area([&](size_t k, void* memory, size_t bytes) {
      cuda_support::count_differences(device, context_.stream(), memory, after[k].data(), bytes,
                                      count.data());
    });
  }
  context_.set_workspace(nullptr, 0);
  copy_out(context_, &different, count.data(), sizeof different);
  return different;
}

RunResult PlacedCase::result() const {
  RunResult result;
  int64_t unique_rows = 0;
  std::vector<std::byte> images = download();
  std::vector<PlacedTensor::Now> seen;
  for (size_t p = 0; p < placed_.size(); ++p) {
    seen.push_back(placed_[p].now({images.data() + image_at_[p], placed_[p].original().size()}));
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (at_[i] < 0) continue;
    PlacedTensor::Now& now = seen[static_cast<size_t>(at_[i])];
    const bool may_differ = is_written_[static_cast<size_t>(at_[i])];
    if (!now.same_surroundings || (!may_differ && !now.same_elements)) {
      result.damage = "memory of '" + call_.name_of(i) + "' was written that is not an output's";
    }
    if (!call_.spec_of(i).is_output) continue;
    Tensor t = made_[i];
    result.memory.push_back(std::move(now.elements));
    t.data = result.memory.back().data();
    cut_to_unique_rows(call_.spec_of(i), t, unique_rows);
    result.outputs.push_back({i, t});
  }
  return result;
}

RunResult run_case(const CaseInputs& inputs, const std::vector<Tensor>& tensors, Context& context,
                   const RunOptions& options) {
  PlacedCase placed(inputs, tensors, context, options);
  if (placed.refusal().empty()) {
    placed.start();
    return placed.result();
  }
  RunResult result;
  result.refusal = placed.refusal();
  return result;
}

}  // namespace ehc::cli
