// Signals that ask a run to end, for loops that save first.
#ifndef MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_
#define MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_

namespace moe {

// While one lives, SIGUSR1 (Slurm: --signal=USR1@120) and the first SIGTERM, SIGHUP (the terminal
// is gone) or SIGINT of the process are recorded. A second one of these three ends the process as
// without this class; SIGUSR1 does not, which launchers send beside others. Signals ignored from
// the start (nohup) remain ignored. One at a time; all ranks of the process share it.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  // The signal that came, SIGUSR1 only if it came alone; 0: none. Any thread.
  int received() const;
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_
