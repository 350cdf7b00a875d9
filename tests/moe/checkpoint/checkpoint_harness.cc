#include "tests/moe/checkpoint/checkpoint_harness.h"

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "tests/comm/local_ranks.h"

namespace moe::testing {
namespace {

struct SavedTensor {
  CanonicalTensor tensor;
  std::vector<const char*> states;
  bool is_double = false;
};

const std::vector<SavedTensor>& Tensors() {
  static const auto& tensors = *new std::vector<SavedTensor>{
      {{.name = "bias", .rows = 3}, {"value"}},
      {{.name = "norm", .cols = 6}, {"m", "master", "v"}},
      {{.name = "shares", .cols = 4}, {"share"}, true},
      {{.name = "weight", .rows = 5, .cols = 7}, {"m", "master", "v"}}};
  return tensors;
}

// Views into memory whose rows are longer than the box.
template <typename T>
MatrixView<const T> Fill(std::vector<std::unique_ptr<std::vector<T>>>& memory, int64_t tensor,
                         int64_t state, const TensorBox& box, int64_t step) {
  const int64_t rows = box.row_end - box.row_begin, cols = box.col_end - box.col_begin;
  const int64_t stride = cols + 2;
  memory.push_back(std::make_unique<std::vector<T>>(rows * stride, T(-1)));
  MatrixView<T> view(memory.back()->data(), rows, cols, stride);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      view(r, c) =
          static_cast<T>(Element(tensor, state, box.row_begin + r, box.col_begin + c, step));
    }
  }
  return view;
}

std::vector<TensorBox> BoxesOf(const CanonicalTensor& tensor, int rank, int ranks, Cut cut) {
  const auto part = [&](int64_t extent, int r) {
    return extent * r / ranks;
  };
  TensorBox box = {.row_end = tensor.rows, .col_end = tensor.cols};
  switch (cut) {
    case Cut::kRows:
      box.row_begin = part(tensor.rows, rank);
      box.row_end = part(tensor.rows, rank + 1);
      break;
    case Cut::kColumns:
      box.col_begin = part(tensor.cols, rank);
      box.col_end = part(tensor.cols, rank + 1);
      break;
    case Cut::kFirstRankAlone:
      if (rank > 0) return {};
      break;
    case Cut::kBlocks: {
      std::vector<TensorBox> boxes;
      int dealt = 0;
      for (int64_t r = 0; r < tensor.rows; r += 2) {
        for (int64_t c = 0; c < tensor.cols; c += 3) {
          if (dealt++ % ranks != rank) continue;
          boxes.push_back({r, std::min(r + 2, tensor.rows), c, std::min(c + 3, tensor.cols)});
        }
      }
      return boxes;
    }
  }
  if (box.row_begin == box.row_end || box.col_begin == box.col_end) return {};
  return {box};
}

template <typename T>
absl::Status CheckBox(CheckpointReader& reader, int64_t t, int64_t s, const TensorBox& box) {
  const SavedTensor& saved = Tensors()[t];
  const int64_t rows = box.row_end - box.row_begin, cols = box.col_end - box.col_begin;
  std::vector<T> memory(rows * cols);
  MOE_RETURN_IF_ERROR(reader.ReadBox(saved.tensor.name, saved.states[s], box,
                                     MatrixView<T>(memory.data(), rows, cols)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const auto expected = static_cast<T>(
          Element(t, s, box.row_begin + r, box.col_begin + c, reader.manifest().step));
      if (memory[r * cols + c] == expected) continue;
      return absl::InternalError(absl::StrCat(saved.tensor.name, " ", saved.states[s], " (",
                                              box.row_begin + r, ", ", box.col_begin + c,
                                              "): ", memory[r * cols + c], ", saved ", expected));
    }
  }
  return absl::OkStatus();
}

}  // namespace

double Element(int64_t tensor, int64_t state, int64_t row, int64_t col, int64_t step) {
  return static_cast<double>(step * 10000 + tensor * 1000 + state * 100 + row * 10 + col);
}

PartMemory PartsOf(int rank, int ranks, Cut cut, int64_t step) {
  PartMemory memory;
  for (size_t t = 0; t < Tensors().size(); ++t) {
    const SavedTensor& saved = Tensors()[t];
    for (const TensorBox& box : BoxesOf(saved.tensor, rank, ranks, cut)) {
      for (size_t s = 0; s < saved.states.size(); ++s) {
        StatePart part = {
            .tensor = &saved.tensor, .state = saved.states[s], .box = box, .data = {}};
        if (saved.is_double) {
          part.data = Fill(memory.doubles, t, s, box, step);
        } else {
          part.data = Fill(memory.floats, t, s, box, step);
        }
        memory.parts.push_back(part);
      }
    }
  }
  return memory;
}

CheckpointState StateOf(int64_t step, const std::string& run) {
  CheckpointState state = {.step = step, .sections = {}};
  state.sections.trainer = absl::StrCat(R"({ "seed": 1234, "steps": [)", step, "] }");
  if (!run.empty()) state.sections.written_by = absl::StrCat("{\"run\":\"", run, "\"}");
  return state;
}

absl::Status SaveRows(CheckpointWriter& writer, Communicator& world, int64_t step,
                      const std::string& run) {
  EXPECT_TRUE(world.Barrier().ok());
  const PartMemory memory = PartsOf(world.rank(), world.size(), Cut::kRows, step);
  EXPECT_TRUE(writer.Start(StateOf(step, run), memory.parts).ok());
  const auto stream = MakeInlineStream();
  return writer.Publish(world, *stream);
}

absl::Status Save(const CheckpointOptions& options, int ranks, Cut cut, int64_t step,
                  const std::string& run) {
  std::vector<absl::Status> statuses(ranks);
  RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) {
    const int rank = world->rank();
    auto writer = CheckpointWriter::Create(options, rank, ranks);
    MOE_RETURN_IF_ERROR(world->Barrier());
    if (!writer.ok()) {
      statuses[rank] = writer.status();
      return absl::OkStatus();
    }
    PartMemory memory = PartsOf(rank, ranks, cut, step);
    (void)(*writer)->Start(StateOf(step, run), memory.parts);
    memory = {};  // what was copied may go
    const auto stream = MakeInlineStream();
    statuses[rank] = (*writer)->Publish(*world, *stream);
    EXPECT_EQ((*writer)->phase(), WriterPhase::kIdle);
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_EQ(status, statuses[0]);
  return statuses[0];
}

absl::Status CheckElements(CheckpointReader& reader, int64_t rows, int64_t cols) {
  for (size_t t = 0; t < Tensors().size(); ++t) {
    const SavedTensor& saved = Tensors()[t];
    for (size_t s = 0; s < saved.states.size(); ++s) {
      for (int64_t r = 0; r < saved.tensor.rows; r += rows) {
        for (int64_t c = 0; c < saved.tensor.cols; c += cols) {
          const TensorBox box = {r, std::min(r + rows, saved.tensor.rows), c,
                                 std::min(c + cols, saved.tensor.cols)};
          MOE_RETURN_IF_ERROR(saved.is_double ? CheckBox<double>(reader, t, s, box)
                                              : CheckBox<float>(reader, t, s, box));
        }
      }
    }
  }
  return absl::OkStatus();
}

int64_t NewestWholeStep(const std::string& folder) {
  const auto found = FindCheckpoint(folder);
  EXPECT_TRUE(found.ok()) << found.status();
  if (!found.ok()) return -2;
  for (const std::string& warning : found->warnings) ADD_FAILURE() << warning;
  if (found->path.empty()) return -1;
  auto reader = CheckpointReader::Open(found->path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  if (!reader.ok()) return -2;
  EXPECT_TRUE(reader->Verify(1).ok());
  const absl::Status elements = CheckElements(*reader, 5, 7);
  EXPECT_TRUE(elements.ok()) << elements;
  return elements.ok() ? found->step : -2;
}

}  // namespace moe::testing
