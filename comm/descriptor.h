// An open file or socket, closed by its owner.
#ifndef MOE_COMM_DESCRIPTOR_H_
#define MOE_COMM_DESCRIPTOR_H_

#include <utility>

#include <unistd.h>

namespace moe {

class Descriptor {
 public:
  // `number` as open(2) and socket(2) return it: negative where nothing is open.
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor() {
    if (is_open()) close(number_);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace moe

#endif  // MOE_COMM_DESCRIPTOR_H_
