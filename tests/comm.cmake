# tests of comm
