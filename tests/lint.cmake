# tests of lint
