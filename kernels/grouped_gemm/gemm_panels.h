// The panels of b that one block of a product reads, in order. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include <absl/types/span.h>

#include "kernels/grouped_gemm/gemm_blocks.h"

namespace moe::gemm {

// A panel of b: `depth` words from step `k`, `cols` columns from `col`. No columns: no panel.
struct Panel {
  int64_t k = 0, col = 0, cols = 0;
  int64_t depth = 0;                 // words of this panel
  int64_t word = 0;                  // upper bound of the words of all earlier segments
  bool first = false, last = false;  // depth block of a sum, over all segments
  int64_t segment = 0, part = 0;     // which depth block it is
  int64_t begin = 0;                 // words of the segment before this panel
  // Approximate rows of a plain b that the panel reads: `steps` from each of `parts` parts of a
  // tree.
  int64_t steps = 0, parts = 1;
  // In a tree: pending nodes beside the panel's sums, and how many of them are added to its own.
  int waiting = 0, folds = 0;
};

// Neighbouring steps of a panel that belong to one chain.
struct Piece {
  int64_t k, steps, words;
  int64_t word;  // words of the panel before this piece
  int folds;     // where a chain ends here: the pending sums that are added to it; else -1
};

struct Pieces {
  absl::Span<const Piece> all() const { return {piece.data(), count}; }

  // A piece ends where a chain, a leaf or a part ends.
  std::array<Piece, kMaxTreeLeaves * GemmTree::kMaxParts + kMostPanelWords / kChainWords> piece;
  size_t count = 0;
};

// The panels of one block, in the order in which they are multiplied: all panels of some columns,
// in ascending depth, before the next columns. A depth block ends where a segment ends: one of an
// exact sum, or in a tree a subtree of LeavesPerPanel leaves; empty subtrees are skipped. Words
// start anew with each segment and with each part of a leaf.
template <typename T>
class Panels {
 public:
  template <typename TOut>
  Panels(const Problem<T, TOut>& problem, const Block& block)
      : block_(block),
        shape_(ShapeFor(problem)),
        tree_(problem.tree),
        subtree_(problem.is_tree() ? LeavesPerPanel(problem) : 0),
        depth_(problem.depth()),
        segments_(problem.exact.segments),
        adds_(problem.write == Write::kAdd) {
    if (subtree_ == 0) return;
    for (int s = 0; s <= tree_.cut.leaves; ++s) leaf_[s] = tree_.cut.Begin(s);
  }

  // An upper bound of the words of all panels of some columns.
  int64_t words() const {
    if (subtree_ == 0)
      return WordsBefore<T>(depth_, std::max<int64_t>(1, std::ssize(segments_) - 1));
    int64_t words = 0;
    for (int s = 0; s < tree_.cut.leaves; ++s) words += LeafWords(s);
    return words;
  }
  Panel First() const { return At(block_.col_begin, NextSegment(0), 0); }
  Panel After(const Panel& panel) const {
    if (panel.begin + panel.depth < Words(panel.segment)) {
      return At(panel.col, panel.segment, panel.part + 1);
    }
    if (!IsLast(panel.segment)) return At(panel.col, NextSegment(panel.segment + 1), 0);
    return At(panel.col + shape_.panel_cols, NextSegment(0), 0);
  }
  Pieces PiecesOf(const Panel& panel) const {
    Pieces pieces;
    if (subtree_ == 0) {
      const int64_t words = Words(panel.segment), begin = Begin(panel.segment);
      AddPieces(panel, {begin, Begin(panel.segment + 1) - begin}, 0, 0, words, 0, pieces);
    }
    int64_t word = 0;  // within the subtree
    for (int s = FirstLeaf(panel.segment); subtree_ > 0 && s < FirstLeaf(panel.segment + 1); ++s) {
      const int64_t leaf = word, end = word + LeafWords(s);
      for (int part = 0; part < tree_.parts; ++part) {
        const Steps steps = {PartBegin(s, part), PartSteps(s, part)};
        const int folds = leaf_[s] < leaf_[s + 1] ? tree_.cut.Folds(s, 1, subtree_) : 0;
        AddPieces(panel, steps, word, leaf, end, folds, pieces);
        word += WordsOf<T>(steps.count);
      }
    }
    if (pieces.count == 0) pieces.piece[pieces.count++] = {};  // no steps, or empty leaves
    return pieces;
  }

 private:
  struct Steps {
    int64_t k, count;
  };

  // Appends the pieces of `steps` within the panel. `steps` begin at word `word` of the segment and
  // belong to a leaf, words [begin, end), after which `folds` nodes are added.
  void AddPieces(const Panel& panel, const Steps& steps, int64_t word, int64_t begin, int64_t end,
                 int folds, Pieces& pieces) const {
    const int64_t stop = std::min(word + WordsOf<T>(steps.count), panel.begin + panel.depth);
    for (int64_t from = std::max(word, panel.begin), to; from < stop; from = to) {
      const int64_t chain = (from - begin) / kChainWords;
      to = std::min(stop, begin + (chain + 1) * kChainWords);
      const bool ends = to == end || (to - begin) % kChainWords == 0;
      const int64_t step = (from - word) * kStepsPerWord<T>;
      pieces.piece[pieces.count++] = {
          .k = steps.k + step,
          .steps = std::min((to - word) * kStepsPerWord<T>, steps.count) - step,
          .words = to - from,
          .word = from - panel.begin,
          .folds = ends ? (chain > 0 || adds_ ? 1 : 0) + (to == end ? folds : 0) : -1};
    }
  }

  Panel At(int64_t col, int64_t segment, int64_t part) const {
    if (col >= block_.col_end) return {};
    // A product without terms still writes zeros: one panel of no steps.
    const int64_t words = Words(segment);
    const int64_t chains = (words + kChainWords - 1) / kChainWords;
    const EvenCut depths(std::max<int64_t>(chains, 1), shape_.panel_depth / kChainWords);
    const int64_t begin = depths.Begin(part) * kChainWords;
    const int64_t end = std::min(depths.Begin(part + 1) * kChainWords, words);
    const bool ends = part + 1 == depths.parts;
    const int64_t step = begin * kStepsPerWord<T>;
    Panel panel = {
        .k = Begin(segment) + step,
        .col = col,
        .cols = std::min(shape_.panel_cols, block_.col_end - col),
        .depth = end - begin,
        .word = WordsBefore<T>(Begin(segment), segment) + begin,
        .first = part == 0,
        .last = ends && (subtree_ == 0 || IsLast(segment)),
        .segment = segment,
        .part = part,
        .begin = begin,
        .steps = std::min(end * kStepsPerWord<T>, Begin(segment + 1) - Begin(segment)) - step};
    if (subtree_ > 0) PlaceInTree(panel, ends);
    return panel;
  }

  void PlaceInTree(Panel& panel, bool ends) const {
    int s = FirstLeaf(panel.segment);
    panel.word = panel.begin;
    for (int before = 0; before < s; ++before) panel.word += LeafWords(before);
    for (int size = subtree_; size < tree_.cut.leaves; size *= 2) {
      const int right = s / size * size;  // end of a preceding left half
      if (s & size) panel.waiting += leaf_[right - size] < leaf_[right] ? 1 : 0;
    }
    while (leaf_[s] == leaf_[s + 1]) {
      if (++s == tree_.cut.leaves) return;  // only empty leaves
    }
    panel.steps = panel.depth * kStepsPerWord<T>;
    if (panel.first && ends && tree_.first_times == 1) {
      panel.parts = tree_.parts;
      panel.steps = leaf_[FirstLeaf(panel.segment + 1)] - leaf_[s];
    }
    int64_t word = panel.begin;
    int part = 0;
    for (; word >= WordsOf<T>(PartSteps(s, part)); ++part) word -= WordsOf<T>(PartSteps(s, part));
    panel.k = PartBegin(s, part) + word * kStepsPerWord<T>;
    if (!ends) return;
    int last = FirstLeaf(panel.segment + 1) - 1;
    while (leaf_[last] == leaf_[last + 1]) --last;
    panel.folds = tree_.cut.Folds(last, subtree_, tree_.cut.leaves);
  }

  // Segments are those of an exact sum, one of all steps, or a tree's subtrees.
  int FirstLeaf(int64_t segment) const { return static_cast<int>(segment) * subtree_; }
  int64_t Begin(int64_t segment) const {
    if (subtree_ > 0) return leaf_[FirstLeaf(segment)];
    if (!segments_.empty()) return segments_[static_cast<size_t>(segment)];
    return segment == 0 ? 0 : depth_;
  }
  // First step of leaf s of a part, and its number of steps.
  int64_t PartBegin(int s, int part) const {
    return tree_.Begin(part) + tree_.Times(part) * leaf_[s];
  }
  int64_t PartSteps(int s, int part) const { return tree_.Times(part) * (leaf_[s + 1] - leaf_[s]); }
  int64_t LeafWords(int s) const {
    return WordsOf<T>(PartSteps(s, 0)) + (tree_.parts - 1) * WordsOf<T>(PartSteps(s, 1));
  }
  int64_t Words(int64_t segment) const {
    if (subtree_ == 0) return WordsOf<T>(Begin(segment + 1) - Begin(segment));
    int64_t words = 0;
    for (int s = FirstLeaf(segment); s < FirstLeaf(segment + 1); ++s) words += LeafWords(s);
    return words;
  }
  // The first segment from `segment` on that is not empty; 0 if all are empty.
  int64_t NextSegment(int64_t segment) const {
    if (subtree_ == 0) return segment;
    while (FirstLeaf(segment) < tree_.cut.leaves && Begin(segment) == Begin(segment + 1)) ++segment;
    return FirstLeaf(segment) < tree_.cut.leaves ? segment : 0;
  }
  bool IsLast(int64_t segment) const {
    if (subtree_ > 0) return Begin(segment + 1) == leaf_[tree_.cut.leaves];
    return segments_.empty() || segment + 2 == std::ssize(segments_);
  }

  Block block_;
  Shape shape_;
  GemmTree tree_;
  int subtree_;  // leaves of a subtree; 0: no tree
  int64_t depth_;
  absl::Span<const int64_t> segments_;
  bool adds_;                                     // to the contents of c
  std::array<int64_t, kMaxTreeLeaves + 1> leaf_;  // first value of each leaf, then their end
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_
