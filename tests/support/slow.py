"""What the default run leaves to ``pytest -m slow``: more cases of what its own cases prove, and the benchmarks' code.

Each test is named with the ids of the cases that stay in the default run, as patterns; where none stays all are slow.
"""

from fnmatch import fnmatchcase

CHAINS = tuple(map(str, range(0, 60, 5)))
SLOW: dict[str, tuple[str, ...]] = {
    # As many random chains as it takes to speak of the worst and the median; a fifth of them shows what breaks.
    "plan/test_milp.py::test_within_one_percent_of_the_optimum": CHAINS,
    "plan/test_milp.py::test_segments_in_segments_cost_no_more": CHAINS,
    "plan/test_milp.py::test_there_is_a_plan_just_where_there_can_be_one": CHAINS,
    "plan/test_milp.py::test_the_graphs_are_many_and_unlike": (),
    "plan/test_milp.py::test_the_worst_and_the_median_of_all_graphs": (),
    # The first of the random models that are the same every time.
    "fuzz/test_fuzz.py::test_the_same_random_models_every_time": ("10",),
    "fuzz/test_fuzz.py::test_the_same_edits_every_time": ("10",),
    "api/test_optimize.py::test_random_nets_at_random_budgets": ("5",),
    # The same search from other budgets.
    "plan/test_plan.py::test_fit_tells_the_truth_and_finds_what_it_saw": ("*-0.02", "*-0.35", "*-0.7", "*-0.99"),
    "plan/test_plan.py::test_a_peak_that_only_one_plan_has_is_told_only_if_it_is_found_again": ("12000",),
    "api/test_optimize.py::test_any_budget_between_lowest_and_original_is_kept_and_proved": ("conv-0", "residual-0.5"),
    "api/test_optimize.py::test_the_lowest_peak_told_when_nothing_fits_can_be_asked_for": ("byte", "a fifth"),
    "api/test_optimize.py::test_compiled_passes_that_take_more_are_planned_below_the_optimizer": (
        "min-within reach",
        "a budget-out of reach",
    ),
    "search/test_reserved.py::test_a_process_that_reserves_more_than_simulated_gets_less_in_one_piece": ("2097152",),
    "search/test_reserved.py::test_where_fragmentation_leaves_no_room_the_report_says_so": (),
    "runtime/test_compiled.py::test_what_is_kept_does_not_run_again_and_nothing_else_is_held": (
        "45%-bfloat16 autocast",
    ),
    "workload/test_micro_batches.py::test_budgets_hold_where_gradients_wait": (
        "SwishNet-rows-min",
        "ResidualNet-images-80%",
        "TinyTransformer-tokens-80%",
    ),
    # The same in another precision, in another model, or compiled.
    "api/test_optimize.py::test_the_same_call_gives_the_same_source": ("conv", "swish"),
    "workload/test_loop.py::test_a_plan_for_a_loop_that_keeps_less_is_over_its_budget": ("language model",),
    "capture/test_lengths.py::test_any_length_runs_in_one_plan_and_within_its_peak": ("bf16",),
    "passes/test_early_casts.py::test_the_lowest_peak_is_lower": ("eager",),
    "passes/test_linear_cross_entropy.py::test_a_budget_that_only_it_meets": ("bf16",),
    "report/test_by_size.py::test_the_figures_are_what_steps_of_those_sizes_take": ("None",),
    "simulate/test_constant_values.py::test_optimized_is_equivalent": ("positions given-float32", "a mask given-bf16"),
    # The same through another spelling: of an output, of a function, of a length.
    "capture/test_returned.py::test_it_lets_the_logits_never_exist": ("tuple",),
    "capture/test_opaque.py::test_the_promised_peak_is_the_real_one": ("Several", "Attribute", "NumpySetUp", "Writes"),
    "equivalence/test_sizes.py::test_what_is_wrong_at_a_smaller_size_alone_is_not_equivalent": ("3-3",),
    # Every loop is simulated and has a plan in one of its models; every hook is tried on one kind of layer, and every
    # kind of layer with a hook forward and one backward.
    "workload/test_loop.py::test_a_plan_is_within_its_budget_in_the_loop_it_is_for": (
        "tutorial-unet",
        "drop-output-language model",
        "zero-before-backward-cnn",
        "zero-in-place-unet",
        "scaler-cnn",
        "ema-language model",
    ),
    "workload/test_loop.py::test_the_report_says_what_each_habit_costs": ("tutorial",),
    "measurement/test_watch.py::test_it_is_silent_where_the_loop_is_the_one_that_was_promised": ("tutorial", "ema"),
    "search/test_candidate.py::test_one_pass_tells_the_peak_of_every_loop": ("tied-*", "residual-ema-1"),
    "benchmarks/test_loops.py::test_the_real_peak_is_the_predicted_one": ("unet-tutorial",),
    "capture/test_kept_calls.py::test_hooks_fire_as_they_did": (
        "ReLU-*",
        "Tanh-backward that changes",
        "<lambda>0-forward with keywords",
        "<lambda>0-before backward",
        "<lambda>1-before, changing the input",
        "<lambda>1-backward",
    ),
    # Hazards that are regions, and edits that compiled code guards, for the same reason as others.
    "capture/test_hazards_regions.py::test_the_odd_submodule_stays_opaque": (
        "own_checkpoint",
        "custom_function",
        "step_counter",
        "numpy_random",
        "branch_on_values",
        "tensor_hook",
    ),
    "runtime/test_edits.py::test_compiled_code_is_guarded_too": (
        "a module in a list",
        "no bias",
        "a tensor",
        "forward of a child",
        "class of a child",
        "a layer appended",
        "layers swapped",
        "a configuration",
        "an item of a dictionary",
        "a wider buffer",
        "stride",
        "a second adapter",
        "an attribute of the class",
        "a function",
        "a table of modules",
    ),
    # The whole command line once more, with children that measure; what is particular is tested without them, too.
    "capture/test_ranges.py::test_the_command_plans_saves_and_measures_at_the_largest": (),
    "workload/test_micro_batches.py::test_the_command_line_accumulates": (),
    # Examples and benchmarks, which are no part of what is installed.
    "project/test_examples.py::test_small_model_is_optimized": ("unet", "gpt2", "seed_mlp"),
    "integrations/test_integrations.py::test_example_trains_alike_in_less": (
        "plain, fp16*",
        "compiled",
        "transformers*",
        "lightning*",
        "timm*",
    ),
    "benchmarks/test_pareto.py::test_rows_of_a_workload": (),
    "benchmarks/test_pareto.py::test_what_will_be_compiled_is_planned_for_it": ("ours+compile min-True",),
    "benchmarks/test_benchmarks.py::test_predictions_are_right_on_the_cpu": ("unet b4 off adafactor frozen",),
    "benchmarks/test_benchmarks.py::test_under_a_cap_the_plan_is_trained_in_another_process": (),
    "benchmarks/test_benchmarks.py::test_stacks_are_about_as_large_as_asked_for": (),
    "benchmarks/test_benchmarks.py::test_largest_batch_of_a_workload": (),
}


def is_slow(test: str) -> bool:
    """Whether the default run leaves out a test, named from ``tests/`` on as pytest names it: ``file::test[id]``."""
    name, _, case = test.partition("[")
    staying = SLOW.get(name)
    return staying is not None and not any(fnmatchcase(case.removesuffix("]"), each) for each in staying)
