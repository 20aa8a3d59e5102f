"""Results of benchmarks: facts about the machine, targets, output."""
