// Signals that ask a run to end, for loops that save first.
#ifndef MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_
#define MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_

namespace moe {

// While one lives, the first SIGTERM, SIGHUP (the terminal is gone), SIGUSR1 (Slurm:
// --signal=USR1@120) or SIGINT of the process is recorded, and the next ends the process as without
// this class. Signals that the process ignored from its start (nohup) remain ignored. One at a
// time; all ranks of the process share it.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  // The signal that came; 0: none. Any thread.
  int received() const;
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_
