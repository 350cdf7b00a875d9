# tests of dispatch
