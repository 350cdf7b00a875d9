# tests of gating
