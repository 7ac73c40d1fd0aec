"""Tests of zeroshard.report."""
