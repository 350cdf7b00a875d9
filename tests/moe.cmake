# tests of moe
