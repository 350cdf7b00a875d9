#include "moe/bench/heat_map.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_replace.h>

namespace moe::bench {
namespace {

// The largest off the diagonal; with one rank, its own.
double Largest(const HeatMap& map) {
  double largest = 0;
  for (int s = 0; s < map.ranks; ++s) {
    for (int d = 0; d < map.ranks; ++d) {
      if ((s != d || map.ranks == 1) && std::isfinite(map.at(s, d))) {
        largest = std::max(largest, map.at(s, d));
      }
    }
  }
  return largest;
}

// 0 .. 1.
double Share(double value, double largest) {
  if (!std::isfinite(value) || largest <= 0) return 0;
  return std::clamp(value / largest, 0.0, 1.0);
}

// White to dark blue, as #rrggbb.
std::string Color(double share) {
  constexpr std::array<int, 3> kLight = {247, 251, 255};
  constexpr std::array<int, 3> kDark = {8, 48, 107};
  std::array<int, 3> mixed = {};
  for (size_t i = 0; i < mixed.size(); ++i) {
    mixed[i] = static_cast<int>(std::lround(kLight[i] + share * (kDark[i] - kLight[i])));
  }
  return absl::StrFormat("#%02x%02x%02x", mixed[0], mixed[1], mixed[2]);
}

std::string NumberText(double value) {
  return std::isfinite(value) ? absl::StrFormat("%.2f", value) : "-";
}

std::string TextAt(double x, double y, absl::string_view anchor, absl::string_view fill,
                   absl::string_view text) {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" fill=\"%s\">%s</text>\n",
                         x, y, anchor, fill, text);
}

}  // namespace

std::string HeatText(const HeatMap& map) {
  constexpr std::array<const char*, 5> kBlocks = {" ", "\u2591", "\u2592", "\u2593", "\u2588"};
  const double largest = Largest(map);
  std::string text = absl::StrCat("# ", map.title, "\n# from\\to");
  for (int d = 0; d < map.ranks; ++d) absl::StrAppend(&text, absl::StrFormat("  %8d ", d));
  text += "\n";
  for (int s = 0; s < map.ranks; ++s) {
    absl::StrAppend(&text, absl::StrFormat("%9d", s));
    for (int d = 0; d < map.ranks; ++d) {
      const double share = Share(map.at(s, d), largest);
      const auto block = static_cast<size_t>(std::lround(share * (kBlocks.size() - 1)));
      absl::StrAppend(&text, absl::StrFormat("  %8s", NumberText(map.at(s, d))), kBlocks[block]);
    }
    text += "\n";
  }
  return text;
}

std::string HeatSvg(const HeatMap& map) {
  constexpr double kCell = 64;
  constexpr double kMargin = 80;
  const double side = kCell * map.ranks;
  const double largest = Largest(map);
  const std::string title = absl::StrReplaceAll(
      map.title, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n<title>%s</title>\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      std::max(side + 2 * kMargin, 480.0), side + 2 * kMargin, title);
  svg += TextAt(kMargin, 24, "start", "black", title);
  svg += TextAt(kMargin, kMargin - 28, "start", "black", "to rank");
  svg += TextAt(8, kMargin - 10, "start", "black", "from rank");
  for (int s = 0; s < map.ranks; ++s) {
    const double y = kMargin + s * kCell;
    svg += TextAt(kMargin - 10, y + kCell / 2 + 4, "end", "black", absl::StrCat(s));
    svg += TextAt(kMargin + s * kCell + kCell / 2, kMargin - 8, "middle", "black", absl::StrCat(s));
    for (int d = 0; d < map.ranks; ++d) {
      const double x = kMargin + d * kCell;
      const double share = Share(map.at(s, d), largest);
      absl::StrAppend(
          &svg, absl::StrFormat("<rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\" "
                                "fill=\"%s\" stroke=\"white\"><title>%d to %d: %s GB/s</title>"
                                "</rect>\n",
                                x, y, kCell, kCell, Color(share), s, d, NumberText(map.at(s, d))));
      svg += TextAt(x + kCell / 2, y + kCell / 2 + 4, "middle", share > 0.5 ? "white" : "black",
                    NumberText(map.at(s, d)));
    }
  }
  svg += TextAt(kMargin, side + kMargin + 28, "start", "black",
                absl::StrFormat("GB/s; darkest = %.2f", largest));
  return svg + "</svg>\n";
}

}  // namespace moe::bench
