"""What the default run leaves to ``pytest -m slow``: more cases of what its own cases prove, and the benchmarks' code.

Each test with the ids of its slow cases, as patterns; a new case is not slow unless it is named here.
"""

from fnmatch import fnmatchcase

CHAINS = tuple(f"{ten}{last}" for ten in ("", *"12345") for last in "12346789")  # of the 60 random chains, by seed
SLOW: dict[str, tuple[str, ...]] = {
    # As many random chains as it takes to speak of the worst and the median; a fifth of them shows what breaks.
    "plan/test_milp.py::test_within_one_percent_of_the_optimum": CHAINS,
    "plan/test_milp.py::test_segments_in_segments_cost_no_more": CHAINS,
    "plan/test_milp.py::test_there_is_a_plan_just_where_there_can_be_one": CHAINS,
    "plan/test_milp.py::test_the_graphs_are_many_and_unlike": ("*",),
    "plan/test_milp.py::test_the_worst_and_the_median_of_all_graphs": ("*",),
    # Each takes a C++ compiler some seconds; two of the kinds of models are enough by default.
    "backends/test_observed.py::test_the_peaks_are_those_of_the_code_with_its_kernels": (
        "transformer",
        "dropout",
        "checkpoint",
    ),
    # All of the random models that are the same every time; the first of them are in the default run.
    "fuzz/test_backends.py::test_the_same_random_models_every_time": ("40",),
    "fuzz/test_backends.py::test_the_same_random_breaks_every_time": ("10",),
    "fuzz/test_fuzz.py::test_the_same_random_models_every_time": ("30",),
    "fuzz/test_fuzz.py::test_the_same_edits_every_time": ("30",),
    "api/test_optimize.py::test_random_nets_at_random_budgets": ("15",),
    # The same in other meshes, graphs and stages, a quarter of a minute each.
    "commands/test_together.py::test_a_plan_is_the_same_with_and_without_the_other_processes": (
        "fsdp=2,tp=2-4",
        "tp=2-2",
    ),
    "backends/test_later_graphs.py::test_the_step_stays_within_the_budget": ("Stack", "Late"),
    "backends/test_later_graphs.py::test_the_lowest_peak_that_is_named_is_reached": ("Three",),
    "benchmarks/test_benchmarks.py::test_largest_batch_without_times": ("*",),
    # More ways of what the other cases show.
    "capture/test_kept_calls.py::test_it_is_a_call_in_one_plan_for_the_whole_model": (
        "memory_handed_on",
        "step_counter",
        "buffer_reassigned",
        "nameless_function",
        "nested",
        "loop_of_unknown_length",
    ),
    "capture/test_opaque.py::test_it_is_called_in_one_plan_for_the_whole_model": (
        "Sign of the class",
        "SetUp",
        "NumpySetUp",
        "Cast",
        "Attribute",
        "a parameter",
        "under no_grad",
    ),
    "backends/test_partition.py::test_numbers_stay_and_bytes_fall": ("dropout", "checkpoint"),
    "passes/test_inplace_activation.py::test_random_programs_keep_every_bit": ("[2-5][0-9]",),
    "torch_internals/test_tensor_parallel.py::test_two_processes_train_as_one_does": ("*",),
    # What other processes find, once more: one that looks for the whole plan is in the default run.
    "backends/test_entry.py::test_another_process_finds_the_graphs": ("*",),
    "codegen/test_codegen.py::test_another_process_gives_the_same_text": ("*",),
    "capture/test_hazards_inputs.py::test_what_a_capture_is_asked_for": (
        "nested_inputs_and_outputs",
        "plain_inputs",
        "variable_arguments",
        "namedtuple",
        "dataclass",
        "inputs_and_constants_as_outputs",
        "parameters_and_buffers_as_outputs",
        "one_output_twice",
        "complex_numbers",
        "strided_inputs",
        "integers_and_booleans",
        "views",
        "in_place",
        "shared_module",
        "listed_in_place",
        "constants",
        "numpy_scalars",
        "nested_regions",
        "shapes",
        "many_operators",
    ),
    "capture/test_lengths_of_parts.py::test_what_fixes_a_length_stays_a_call_where_a_range_is_named": ("Chunks",),
    "rewriting/test_every_pass.py::test_a_pass_says_what_it_changed_and_changes_it_once": ("residual-*", "tied-*"),
    "passes/test_early_casts.py::test_needless_casts_stay_where_the_peak_is_lower_with_them": ("of no use",),
    "passes/test_tiles.py::test_a_budget_that_only_it_meets": ("float32", "batches"),
    "passes/test_linear_cross_entropy.py::test_artifact_and_copies_have_it": ("*",),
    "search/test_reserved.py::test_what_is_reserved_is_within_the_budget": ("*",),
    "commands/test_cli.py::test_what_was_measured_is_in_the_table_and_saved": ("*",),
    # The same search from other budgets.
    "plan/test_plan.py::test_fit_tells_the_truth_and_finds_what_it_saw": ("*-0.2", "*-0.5", "*-0.9", "*-1.[05]"),
    "plan/test_plan.py::test_a_peak_that_only_one_plan_has_is_told_only_if_it_is_found_again": ("9000", "14000"),
    "api/test_optimize.py::test_any_budget_between_lowest_and_original_is_kept_and_proved": (
        "conv-0.5",
        "swish-0",
        "residual-0",
    ),
    "api/test_optimize.py::test_the_lowest_peak_told_when_nothing_fits_can_be_asked_for": ("parameters",),
    "api/test_optimize.py::test_compiled_passes_that_take_more_are_planned_below_the_optimizer": (
        "min-out of reach",
        "a budget-within reach",
    ),
    "search/test_reserved.py::test_a_process_that_reserves_more_than_simulated_gets_less_in_one_piece": ("20971520",),
    "search/test_reserved.py::test_where_fragmentation_leaves_no_room_the_report_says_so": ("*",),
    "runtime/test_compiled.py::test_what_is_kept_does_not_run_again_and_nothing_else_is_held": ("60%-*", "75%-*"),
    "workload/test_micro_batches.py::test_budgets_hold_where_gradients_wait": (
        "SwishNet-rows-80%",
        "ResidualNet-images-min",
        "TinyTransformer-tokens-min",
    ),
    # The same in another precision, in another model, or compiled.
    "api/test_optimize.py::test_the_same_call_gives_the_same_source": ("transformer",),
    "workload/test_loop.py::test_a_plan_for_a_loop_that_keeps_less_is_over_its_budget": ("unet",),
    "workload/test_loop.py::test_a_plan_is_within_its_budget_in_the_loop_it_is_for": (
        "tutorial-language model",
        "tutorial-cnn",
        "prefetch-unet",
        "ema-language model",
        "scaler-cnn",
    ),
    "capture/test_lengths.py::test_any_length_runs_in_one_plan_and_within_its_peak": ("None",),
    "passes/test_early_casts.py::test_the_lowest_peak_is_lower": ("compiled",),
    "passes/test_linear_cross_entropy.py::test_a_budget_that_only_it_meets": ("float32", "batches"),
    "report/test_by_size.py::test_the_figures_are_what_steps_of_those_sizes_take": ("bf16",),
    "simulate/test_constant_values.py::test_optimized_is_equivalent": (
        "nothing given-bf16",
        "a mask given-float32",
        "positions given-bf16",
    ),
    # The same through another spelling: of an output, of a function, of a length.
    "capture/test_returned.py::test_it_lets_the_logits_never_exist": ("dict", "named"),
    "capture/test_opaque.py::test_the_promised_peak_is_the_real_one": ("Sign", "Numpy", "Branch", "Kernel"),
    "capture/test_kept_calls.py::test_the_promised_peak_is_the_real_one": ("branch_on_values", "tensor_hook"),
    "search/test_regions.py::test_a_submodule_that_hands_on_through_what_it_is_given_is_left_alone": ("Shelf",),
    "equivalence/test_sizes.py::test_what_is_wrong_at_a_smaller_size_alone_is_not_equivalent": ("4-8",),
    # Every loop is simulated, by one pass too, and has a plan; together they are only combined.
    "workload/test_loop.py::test_the_report_says_what_each_habit_costs": ("zero-before-backward,prefetch,scaler,ema",),
    "measurement/test_watch.py::test_it_is_silent_where_the_loop_is_the_one_that_was_promised": (
        "drop-output",
        "zero-before-backward",
        "prefetch",
    ),
    **dict.fromkeys(
        (
            "measurement/test_watch.py::test_an_output_that_is_alive_in_backward",
            "measurement/test_watch.py::test_another_batch",
            "measurement/test_watch.py::test_other_tensors",
            "measurement/test_watch.py::test_tensors_without_storage_are_passed_over",
            "measurement/test_watch.py::test_an_optimizer_that_refused_its_arguments_is_passed_over",
            "measurement/test_watch.py::test_a_larger_batch",
            "measurement/test_watch.py::test_what_nobody_knows_is_said_so",
            "measurement/test_watch.py::test_an_error_of_the_loop_is_the_loops_own",
        ),
        ("unet",),
    ),
    "search/test_candidate.py::test_one_pass_tells_the_peak_of_every_loop": ("residual-*",),
    "benchmarks/test_loops.py::test_the_real_peak_is_the_predicted_one": ("language model-prefetch",),
    # Every hook is tried on a ReLU, and every other layer with a hook forward and one backward.
    "capture/test_kept_calls.py::test_hooks_fire_as_they_did": (
        "Tanh-forward*",
        "Tanh-before backward",
        "Tanh-backward",
        "<lambda>0-forward",
        "<lambda>0-forward that *",
        "<lambda>0-before, *",
        "<lambda>0-backward*",
        "<lambda>1-forward*",
        "<lambda>1-backward that *",
        "<lambda>1-before backward",
        "ReLU-forward with keywords",
    ),
    # Hazards that are regions, and edits that compiled code guards, for the same reason as others.
    "capture/test_hazards_regions.py::test_the_odd_submodule_stays_opaque": (
        "layer_drop",
        "buffer_reassigned",
        "seeded",
        "gradients",
    ),
    "runtime/test_edits.py::test_compiled_code_is_guarded_too": (
        "a layer appended to a list",
        "a layer inserted",
        "a layer removed",
        "another activation",
        "another configuration",
        "an object in a dictionary",
        "an item of a list",
        "padding",
        "dilation",
        "active adapter",
        "scale of an adapter",
        "a method of the model",
        "an attribute set past the module",
        "another type of number",
        "layers swapped",
        "stride",
        "an item of a dictionary",
        "an attribute that was asked for",
        "a module in a list",
        "a second adapter",
        "no bias",
        "a table of modules",
        "an empty list filled at once",
        "a configuration",
        "all attributes of a child",
        "all attributes of an object",
        "an attribute of the class",
    ),
    # The same of segments in segments or of nodes kept; the other is in the default run.
    "runtime/test_compiled.py::test_a_plan_for_the_compiler_divides_only_segments_that_keep_nodes": ("nodes kept",),
    "runtime/test_compiled.py::test_compiled_backward_comes_to_a_segment_once_its_gradients_are_there": (
        "nodes kept",
        "segments in segments",
    ),
    # Other ways to parallelize a model and to take a step of it.
    "torch_internals/test_parallelized.py::test_a_budget_holds_in_two_processes": ("llama-?", "sequence-?", "transf*"),
    "torch_internals/test_parallelized.py::test_they_train_as_they_did": ("llama-?", "sequence-?", "transf*"),
    "torch_internals/test_parallelized.py::test_each_process_has_the_same_plan": ("llama", "sequence", "transformers"),
    "torch_internals/test_parallelized.py::test_another_step_is_planned": (
        "in bf16",
        "micro batches",
        "a range of lengths",
    ),
    "torch_internals/test_two_dimensions.py::test_a_budget_holds_in_four_processes": ("*",),
    "torch_internals/test_two_dimensions.py::test_they_train_as_they_did": ("*",),
    "torch_internals/test_two_dimensions.py::test_each_process_has_the_same_plan": ("*",),
    "torch_internals/test_two_dimensions.py::test_each_process_estimates_what_it_takes": ("*",),
    # The whole command line once more, with children that measure; what is particular is tested without them, too.
    "capture/test_ranges.py::test_the_command_plans_saves_and_measures_at_the_largest": ("*",),
    "commands/test_together.py::test_an_error_ends_both_and_is_told_once": (
        "budget",
        "one process alone",
        "proof of shards",
    ),
    "workload/test_micro_batches.py::test_the_command_line_accumulates": ("*",),
    # Examples and benchmarks, which are no part of what is installed.
    "project/test_examples.py::test_small_model_is_optimized": ("efficientnet", "resnet50"),
    "integrations/test_integrations.py::test_example_trains_alike_in_less": ("plain", "plain, *", "compiled"),
    "integrations/test_in_processes.py::test_example_trains_alike_in_less": (
        "accelerate*",
        "transformers*",
        "lightning*",
    ),
    "integrations/test_in_processes.py::test_a_trainer_says_its_mesh_and_saves_what_it_trained": ("*",),
    "benchmarks/test_loops.py::test_what_there_was_no_time_for_is_said": ("*",),
    "benchmarks/test_mesh.py::test_two_processes_take_what_one_predicts_alone": ("*",),
    "benchmarks/test_pareto.py::test_rows_of_a_workload": ("*",),
    "benchmarks/test_pareto.py::test_what_will_be_compiled_is_planned_for_it": ("ours min-False",),
    "benchmarks/test_benchmarks.py::test_predictions_are_right_on_the_cpu": ("unet b4 off sgd-momentum ours 80%",),
    "benchmarks/test_benchmarks.py::test_under_a_cap_the_plan_is_trained_in_another_process": ("*",),
    "benchmarks/test_benchmarks.py::test_stacks_are_about_as_large_as_asked_for": ("*",),
    "benchmarks/test_benchmarks.py::test_largest_batch_of_a_workload": ("*",),
}


def is_slow(test: str) -> bool:
    """Whether the default run leaves out a test, named from ``tests/`` on as pytest names it: ``file::test[id]``."""
    name, _, case = test.partition("[")
    return any(fnmatchcase(case.removesuffix("]"), pattern) for pattern in SLOW.get(name, ()))
