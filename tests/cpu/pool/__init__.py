"""The planned pool (native/pool.cpp, runtime/pool): right whatever a step does, as planned where it does what was logged."""
