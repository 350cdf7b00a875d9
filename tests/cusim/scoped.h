// A setting of the simulation as long as an object lives.
#ifndef MOE_TESTS_CUSIM_SCOPED_H_
#define MOE_TESTS_CUSIM_SCOPED_H_

namespace cusim {

// Set(setting), beside the setting's type, makes it the one in force and returns the one before.
template <typename Setting>
class Scoped {
 public:
  explicit Scoped(const Setting& setting) : before_(Set(setting)) {}
  ~Scoped() { Set(before_); }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  const Setting before_;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_SCOPED_H_
