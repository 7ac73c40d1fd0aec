"""Tests of zeroshard.tensor; a package, so that it comes before the benchmark of that name."""
