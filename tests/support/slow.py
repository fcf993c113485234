"""What the default run leaves to ``pytest -m slow``: more cases of what its own cases prove, and the benchmarks' code.

Each test with the ids of its slow cases, as patterns; what a pattern after "!" matches stays in the default run all
the same. A new case is not slow unless a pattern matches it.
"""

from fnmatch import fnmatchcase

CHAINS = tuple(f"{ten}{last}" for ten in ("", *"12345") for last in "123456789")  # of the 60 random chains, by seed
FRONT_ENDS = {  # patterns for graphs of either front end, and what is tried in those of both by default
    "composites.py::test_every_spelling_becomes_native": "tanh GELU-x *",
    "composites.py::test_near_misses_are_left_alone": "other slope-*",
    "chunked_cross_entropy.py::test_every_spelling_keeps_every_bit": "functional-*",
    "linear_cross_entropy.py::test_every_spelling_is_as_good": "functional-*",
    "linear_cross_entropy.py::test_refused": "logits returned-*",
    "tiles.py::test_runs_some_rows_at_a_time": "SwiGLU-*",
    "fused_chains.py::test_becomes_one": "RMSNorm-*",
    "early_casts.py::test_every_bit_stays": "*-residual-*",
    "functionalize.py::test_writes_to_activations_go": "relu_-*",
    "functionalize.py::test_living_aliases_and_odd_writes_stay_with_a_sentence": "view read later-*",
    "inplace_activation.py::test_what_nobody_reads_is_written_over": "relu-*",
    "inplace_activation.py::test_traps_are_refused_with_a_sentence": "residual-*",
    "swish.py::test_every_spelling_with_beta_one_becomes_silu": "torch-*",
    "swish.py::test_every_spelling_with_a_beta_becomes_swish": "constant-*",
    "tied_embeddings.py::test_gradients_have_the_same_bits": "embedding and head-*",
}
SLOW: dict[str, tuple[str, ...]] = {
    # As many random chains as it takes to speak of the worst and the median; a tenth of them shows what breaks.
    "plan/test_milp.py::test_within_one_percent_of_the_optimum": CHAINS,
    "plan/test_milp.py::test_segments_in_segments_cost_no_more": CHAINS,
    "plan/test_milp.py::test_there_is_a_plan_just_where_there_can_be_one": CHAINS,
    "plan/test_milp.py::test_the_graphs_are_many_and_unlike": ("*",),
    "plan/test_milp.py::test_the_worst_and_the_median_of_all_graphs": ("*",),
    # As the back end compiled before, which takes several tries for each budget.
    "backends/test_tries.py::test_budgets_from_the_lowest_on_are_met_by_real_code": ("fused as ever",),
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
    "commands/test_together.py::test_a_plan_is_the_same_with_and_without_the_other_processes": ("*",),
    "backends/test_later_graphs.py::test_the_step_stays_within_the_budget": ("Stack", "Late"),
    "backends/test_later_graphs.py::test_the_lowest_peak_that_is_named_is_reached": ("Three", "Stack"),
    "benchmarks/test_benchmarks.py::test_largest_batch_without_times": ("*",),
    # More ways of what the other cases show.
    "capture/test_kept_calls.py::test_it_is_a_call_in_one_plan_for_the_whole_model": (
        "*",
        "!branch_on_values",
        "!layer_drop",
        "!tensor_hook",
        "!in_place",
    ),
    "capture/test_opaque.py::test_it_is_called_in_one_plan_for_the_whole_model": (
        "*",
        "!Sign",
        "!Several",
        "!Dirty",
        "!NumpyDrawn",
        "!Branch",
        "!Kernel",
        "!Writes",
    ),
    "backends/test_partition.py::test_numbers_stay_and_bytes_fall": ("mlp", "dropout", "checkpoint"),
    "passes/test_inplace_activation.py::test_random_programs_keep_every_bit": ("[1-5][0-9]",),
    "torch_internals/test_tensor_parallel.py::test_two_processes_train_as_one_does": ("*",),
    # What other processes find, once more: one that looks for the whole plan is in the default run.
    "backends/test_entry.py::test_another_process_finds_the_graphs": ("*",),
    "codegen/test_codegen.py::test_another_process_gives_the_same_text": ("*",),
    "artifact/test_artifact.py::test_verified_in_a_fresh_process": ("*",),
    "artifact/test_artifact.py::test_the_models_source_is_compared": ("comment",),
    "capture/test_hazards_inputs.py::test_what_a_capture_is_asked_for": (
        "*",
        "!keywords_and_none",
        "!loss_in_a_dict",
        "!batch_of_one",
        "!channels_last_model",
        "!weight_norm",
        "!buffers_in_place",
        "!frozen_batch_norm",
        "!autocast_regions",
        "!checkpoints",
        "!random_numbers",
        "!recurrent",
        "!view_of_an_input_as_output",
    ),
    "capture/test_lengths_of_parts.py::test_what_fixes_a_length_stays_a_call_where_a_range_is_named": ("Chunks",),
    "rewriting/test_every_pass.py::test_a_pass_says_what_it_changed_and_changes_it_once": (
        "residual-*",
        "tied-*",
        "transformer-*",
        "!transformer-swish",
        "!transformer-inplace_activation",
    ),
    "passes/test_early_casts.py::test_needless_casts_stay_where_the_peak_is_lower_with_them": ("of no use",),
    "passes/test_tiles.py::test_a_budget_that_only_it_meets": ("float32", "batches"),
    "passes/test_tiles.py::test_it_is_for_what_nothing_else_reaches": ("*",),
    "passes/test_linear_cross_entropy.py::test_artifact_and_copies_have_it": ("*",),
    "search/test_reserved.py::test_what_is_reserved_is_within_the_budget": ("*",),
    "commands/test_cli.py::test_what_was_measured_is_in_the_table_and_saved": ("*",),
    # The same search from other budgets.
    "plan/test_plan.py::test_fit_tells_the_truth_and_finds_what_it_saw": ("*-0.[2579]", "*-1.[05]"),
    "plan/test_plan.py::test_a_peak_that_only_one_plan_has_is_told_only_if_it_is_found_again": ("9000", "14000"),
    "api/test_optimize.py::test_any_budget_between_lowest_and_original_is_kept_and_proved": ("*", "!residual-0.5"),
    "api/test_optimize.py::test_a_pass_that_does_harm_is_caught_and_named": ("0.0",),
    "api/test_optimize.py::test_the_lowest_peak_told_when_nothing_fits_can_be_asked_for": ("parameters", "a fifth"),
    "api/test_optimize.py::test_compiled_passes_that_take_more_are_planned_below_the_optimizer": (
        "min-out of reach",
        "a budget-within reach",
    ),
    "search/test_reserved.py::test_a_process_that_reserves_more_than_simulated_gets_less_in_one_piece": ("20971520",),
    "search/test_reserved.py::test_where_fragmentation_leaves_no_room_the_report_says_so": ("*",),
    "search/test_reserved.py::test_one_piece_reaches_a_budget_of_reserved_bytes_that_pieces_do_not": ("*",),
    "runtime/test_compiled.py::test_what_is_kept_does_not_run_again_and_nothing_else_is_held": ("60%-*", "75%-*"),
    "runtime/test_compiled.py::test_compiled_it_holds_what_was_planned_across_skip_connections": ("*",),
    "workload/test_micro_batches.py::test_budgets_hold_where_gradients_wait": ("*", "!ResidualNet-images-80%"),
    # The same in another precision, in another model, or compiled.
    "api/test_optimize.py::test_the_same_call_gives_the_same_source": ("transformer",),
    "workload/test_loop.py::test_a_plan_for_a_loop_that_keeps_less_is_over_its_budget": ("unet",),
    "workload/test_loop.py::test_a_plan_is_within_its_budget_in_the_loop_it_is_for": (
        "*",
        "!tutorial-unet",
        "!drop-output-language model",
    ),
    "capture/test_lengths.py::test_any_length_runs_in_one_plan_and_within_its_peak": ("None",),
    "passes/test_early_casts.py::test_the_lowest_peak_is_lower": ("compiled",),
    "passes/test_linear_cross_entropy.py::test_a_budget_that_only_it_meets": ("float32", "batches"),
    "passes/test_linear_cross_entropy.py::test_it_is_for_what_takes_longer_without_it": ("20.0-*",),
    "report/test_by_size.py::test_the_figures_are_what_steps_of_those_sizes_take": ("bf16",),
    "simulate/test_constant_values.py::test_optimized_is_equivalent": (
        "*",
        "!a mask given-bf16",
        "!nothing given-float32",
    ),
    # The same through another spelling: of an output, of a function, of a length.
    "capture/test_returned.py::test_it_lets_the_logits_never_exist": ("dict", "named"),
    "capture/test_opaque.py::test_the_promised_peak_is_the_real_one": ("*", "!Several", "!Writes"),
    "capture/test_kept_calls.py::test_the_promised_peak_is_the_real_one": ("branch_on_values", "tensor_hook"),
    "search/test_regions.py::test_a_submodule_that_hands_on_through_what_it_is_given_is_left_alone": ("Shelf",),
    "equivalence/test_sizes.py::test_what_is_wrong_at_a_smaller_size_alone_is_not_equivalent": ("4-8",),
    # Every loop is simulated, by one pass too, and has a plan; together they are only combined.
    "workload/test_loop.py::test_the_report_says_what_each_habit_costs": ("zero-before-backward,prefetch,scaler,ema",),
    "measurement/test_watch.py::test_it_is_silent_where_the_loop_is_the_one_that_was_promised": ("*", "!tutorial"),
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
    "benchmarks/test_loops.py::test_the_real_peak_is_the_predicted_one": ("*",),
    # Every hook is tried on a ReLU, and every other layer with a hook forward and one backward.
    "capture/test_kept_calls.py::test_hooks_fire_as_they_did": (
        "*",
        "!ReLU-forward that changes *",
        "!ReLU-before, *",
        "!ReLU-backward that changes",
        "!ReLU-before backward",
        "!Tanh-backward that changes",
        "!<lambda>0-forward with keywords",
    ),
    # Hazards that are regions, and edits that compiled code guards, for the same reason as others.
    "capture/test_hazards_regions.py::test_the_odd_submodule_stays_opaque": (
        "*",
        "!custom_function",
        "!tensor_hook",
        "!branch_on_values",
    ),
    "runtime/test_edits.py::test_compiled_code_is_guarded_too": (
        "*",
        "!a layer appended",
        "!forward of a child",
        "!a function",
        "!a tensor",
    ),
    # The same of segments in segments or of nodes kept; the other is in the default run.
    "runtime/test_compiled.py::test_a_plan_for_the_compiler_divides_only_segments_that_keep_nodes": ("nodes kept",),
    "runtime/test_compiled.py::test_compiled_backward_comes_to_a_segment_once_its_gradients_are_there": (
        "nodes kept",
        "segments in segments",
    ),
    # Other ways to parallelize a model and to take a step of it.
    "torch_internals/test_parallelized.py::test_a_budget_holds_in_two_processes": ("*", "!mlp-?", "!*before-?"),
    "torch_internals/test_parallelized.py::test_they_train_as_they_did": ("*", "!mlp-?", "!*before-?"),
    "torch_internals/test_parallelized.py::test_each_process_has_the_same_plan": ("*", "!mlp", "!*before"),
    "torch_internals/test_parallelized.py::test_another_step_is_planned": (
        "in bf16",
        "micro batches",
        "a range of lengths",
    ),
    "torch_internals/test_parallelized.py::test_a_mixture_of_experts_is_planned": ("*",),
    "torch_internals/test_two_dimensions.py::test_a_budget_holds_in_four_processes": ("*",),
    "torch_internals/test_two_dimensions.py::test_they_train_as_they_did": ("*",),
    "torch_internals/test_two_dimensions.py::test_each_process_has_the_same_plan": ("*",),
    "torch_internals/test_two_dimensions.py::test_each_process_estimates_what_it_takes": ("*",),
    # The whole command line once more, with children that measure; what is particular is tested without them, too.
    "capture/test_ranges.py::test_the_command_plans_saves_and_measures_at_the_largest": ("*",),
    "commands/test_together.py::test_an_error_ends_both_and_is_told_once": (
        "budget",
        "one process alone",
        "proof",
        "proof of shards",
    ),
    "workload/test_micro_batches.py::test_the_command_line_accumulates": ("*",),
    # Examples and benchmarks, which are no part of what is installed.
    "project/test_examples.py::test_small_model_is_optimized": ("*", "!seed_mlp", "!unet"),
    "project/test_examples.py::test_efficientnet_with_drop_path_is_optimized": ("*",),
    "integrations/test_integrations.py::test_example_trains_alike_in_less": ("plain", "plain, *", "compiled"),
    "integrations/test_in_processes.py::test_example_trains_alike_in_less": ("*",),
    "integrations/test_in_processes.py::test_a_trainer_says_its_mesh_and_saves_what_it_trained": ("*",),
    "benchmarks/test_loops.py::test_what_there_was_no_time_for_is_said": ("*",),
    "benchmarks/test_mesh.py::test_two_processes_take_what_one_predicts_alone": ("*",),
    "benchmarks/test_pareto.py::test_rows_of_a_workload": ("*",),
    "benchmarks/test_pareto.py::test_what_will_be_compiled_is_planned_for_it": ("ours min-False",),
    "benchmarks/test_benchmarks.py::test_predictions_are_right_on_the_cpu": ("*",),
    "benchmarks/test_benchmarks.py::test_seconds_are_told_by_stage": ("*",),
    "benchmarks/test_benchmarks.py::test_under_a_cap_the_plan_is_trained_in_another_process": ("*",),
    "benchmarks/test_benchmarks.py::test_stacks_are_about_as_large_as_asked_for": ("*",),
    "benchmarks/test_benchmarks.py::test_largest_batch_of_a_workload": ("*",),
    # As many inputs, hooks, effects and kinds of functions as there are; those that differ most are in the default run.
    "capture/test_hazards_inputs.py::test_three_steps_are_those_of_the_original": (
        "*",
        "!dict, None and plain outputs",
        "!dict given",
        "!complex",
        "!view written",
        "!channels_last",
        "!autocast region",
        "!tied weights, shared module",
    ),
    "capture/test_hazards_use.py::test_derivatives_of_every_kind": ("Hessian", "torch.func.*", "functional_call"),
    "capture/test_hazards_use.py::test_ways_of_training": ("copied", "pickled"),
    "capture/test_hazards_use.py::test_torch_refuses_its_func_transforms_of_what_is_recomputed": ("jacrev",),
    "capture/test_kept_calls.py::test_it_travels": ("by_copy", "by_pickle"),
    "capture/test_kept_calls.py::test_what_repeats_and_leaves_no_trace_may_run_again": ("dropout_behind_a_branch",),
    "capture/test_kept_calls.py::test_it_is_verified": ("float32",),
    "capture/test_kept_calls.py::test_it_runs_once_a_step": ("layer_drop",),
    "capture/test_kept_calls.py::test_sizes_that_have_ranges_vary_around_it": ("3.0",),
    "capture/test_library.py::test_an_operator_with_a_rule_is_called_in_the_plan": ("launched",),
    "capture/test_library.py::test_one_that_does_not_repeat_runs_once_a_step": ("drawn_by_numpy",),
    "capture/test_lengths.py::test_a_strict_result_refuses_what_may_take_more_and_nothing_else": ("a copy",),
    "capture/test_lengths_of_parts.py::test_a_call_gives_a_length_of_its_own_or_what_has_it_inside_is_the_call": (
        "Filled-*",
    ),
    "capture/test_returned.py::test_the_loss_and_its_gradients_are_the_same": ("dict", "named"),
    "capture/test_weight_hooks.py::test_what_lies_beside_it_is_rewritten": ("spectral_norm",),
    "runtime/test_edits.py::test_an_edit_runs_the_original_and_is_named_once": (
        "*-before_*",
        "!a layer appended-*",
        "!forward of a child-*",
    ),
    # The same graph from the other front end, once a pattern is known to be found in what both give.
    **{f"passes/test_{test}": ("*-dynamo", f"!{kept}") for test, kept in FRONT_ENDS.items()},
    "passes/test_attention_in_pieces.py::test_runs_in_pieces": ("*-dynamo-*", "!plain-*"),
    # The same arithmetic in other types, reductions, sizes and splits.
    "passes/test_chunked_cross_entropy.py::test_autocast_does_to_it_what_it_does_to_cross_entropy": (
        "sum-*",
        "none-*",
        "!none-torch.float32-*",
    ),
    "passes/test_chunked_cross_entropy.py::test_the_bits_of_cross_entropy": ("0-*", "3-none-*", "3-sum-*"),
    "passes/test_attention_in_pieces.py::test_gradients_of_gradients": ("[23]",),
    "runtime/test_writes_in_segments.py::test_every_number_is_the_same": ("*-[1359]",),
    "runtime/test_segments.py::test_dropout_masks_and_the_random_state_afterwards_are_the_same": ("[15]", "size[46]"),
    "runtime/test_compiled.py::test_compiled_it_computes_the_same": ("nodes kept",),
    "runtime/test_compiled.py::test_compiled_statistics_are_found_once_where_they_are_kept": ("False",),
    "runtime/test_dropin.py::test_a_report_of_the_models_own_stays": ("*-1GB",),
    "runtime/test_dropin.py::test_hooks_on_the_model_fire_once_per_call_and_not_while_optimizing": ("pre-before",),
    "simulate/test_course.py::test_a_pass_counts_again_as_it_ran": ("bf16-*", "!bf16-tutorial-*"),
    "simulate/test_course.py::test_programs_count_as_they_run": ("asked1",),
    "simulate/test_repeats.py::test_a_repeated_timeline_is_that_of_all_operators": ("target1-*", "!target1-chain_mlp"),
    "simulate/test_repeats.py::test_rows_of_logits_are_counted_again": ("target1-*", "!target1-True-True-True"),
    "simulate/test_attribution.py::test_generated_code_calls_no_submodules_and_names_them_all_the_same": ("regions",),
    "search/test_candidate.py::test_one_pass_tells_the_peak_of_two_steps": (
        "residual-adamw",
        "transformer-*",
        "!transformer-adamw",
    ),
    "search/test_regions.py::test_regions_travel": ("by_pickle",),
    "plan/test_plan.py::test_the_lowest_peak_told_is_reached_when_asked_for": ("*-0.3",),
    "costs/test_normalizations.py::test_compiled_it_is_the_operator_itself": ("no formula",),
    "costs/test_normalizations.py::test_it_takes_no_more_memory": ("no formula",),
    "costs/test_normalizations.py::test_they_are_kept_where_there_is_a_kernel": ("cpu",),
    "targets/test_cuda_from_cpu.py::test_a_step_is_simulated": ("fp16",),
    "targets/test_cuda_scratch.py::test_what_a_chain_takes_is_what_inductor_writes_for_it": (
        "norm of a Llama",
        "layer norm",
    ),
    "report/test_by_size.py::test_the_command_line_says_in_json_what_was_computed": ("no page",),
    "report/test_snapshot.py::test_the_peaks_are_those_of_the_report": ("compiled",),
    "measurement/test_measure.py::test_failure_of_the_child_is_one_sentence": ("device",),
    # What is divided or proved in the other kinds of graphs, and code that only Inductor writes.
    "backends/test_tries.py::test_budgets_from_the_lowest_on_are_met_by_real_code": ("*",),
    "backends/test_rows.py::test_the_sum_is_one_tensor_with_the_bits_of_two": ("one head-100%", "two heads-min"),
    "backends/test_stretches.py::test_any_runs_may_be_cut_anywhere": ("[1-9][0-9][0-9]",),
    "backends/test_partition.py::test_regions_may_begin_to_make_things_again_before_their_own": (
        "*-8",
        "mlp-*",
        "!transformer-8",
    ),
    "backends/test_partition.py::test_gradients_that_are_made_apart_are_the_same": ("dropout",),
    "backends/test_partition.py::test_fused_kernels_are_counted_for_less": ("mlp",),
    "backends/test_proof.py::test_a_plan_is_proved_and_the_step_is_as_ever": ("mlp", "dropout", "checkpoint"),
    "backends/test_later_graphs.py::test_the_second_step_is_the_last_to_compile": ("*", "!Three"),
    "backends/test_observed.py::test_the_lowest_peak_is_that_of_the_lower_code": ("-1000",),
    "torch_internals/test_written_over.py::test_bits_are_the_same": ("turned", "normed", "transposed", "softmax"),
    "torch_internals/test_symbolic_recall.py::test_what_is_traced_is_the_same": ("images", "numbers"),
    "api/test_optimize.py::test_the_promised_peak_is_the_real_one_to_the_byte": (
        "*",
        "!conv-sgd",
        "!swish-adamw",
        "!transformer-adamw bf16",
    ),
    "api/test_optimize.py::test_inputs_are_cast_before_their_segments_where_the_compiled_step_takes_less_so": (
        "min-more",
        "a budget below-less",
    ),
    "api/test_optimize.py::test_a_budget_that_holds_already_makes_no_segments": ("100%", "1000000000000"),
    "workload/test_loop.py::test_a_simulated_step_takes_what_the_written_loop_takes": (
        "*-language model",
        "!tutorial-*",
    ),
    # More of what processes do together, each of which starts two: a case of each kind is in the default run.
    "equivalence/test_in_mesh.py::test_training_in_the_mesh_is_compared_bit_for_bit": (
        "fsdp in bf16-*",
        "replicas-*",
        "tensor parallel-*",
        "in both-*",
        "wrapped before-*",
    ),
    "equivalence/test_in_mesh.py::test_a_wrong_rewrite_ends_all": ("in both", "tensor parallel"),
    "equivalence/test_in_mesh.py::test_a_process_that_fails_ends_all": ("in both", "tensor parallel"),
    "api/test_ddp.py::test_training_is_the_same_and_within_the_budget": ("view", "static", "unused"),
    "torch_internals/test_fsdp.py::test_what_is_simulated_is_what_two_processes_take": (
        "*",
        "!fsdp=2",
        "!fsdp=2,param-dtype=*",
    ),
    "torch_internals/test_fsdp.py::test_a_budget_holds_for_what_was_sharded_before": ("*,grouped",),
    "torch_internals/test_fsdp.py::test_sharded_units_train_as_they_did": ("*,grouped-?",),
    "torch_internals/test_fsdp.py::test_what_is_resharded_to_parts_takes_more_the_fewer_they_are": ("4",),
    "torch_internals/test_fsdp_arguments.py::test_a_budget_holds_in_two_processes": ("*",),
    "torch_internals/test_fsdp_arguments.py::test_a_budget_holds_for_units_in_units_and_hooks_in_units": ("*",),
    "torch_internals/test_fsdp_arguments.py::test_they_train_as_they_did": ("*",),
    "torch_internals/test_fsdp_arguments.py::test_what_lies_on_the_host_takes_nothing_of_a_gpu": (
        "*",
        "!1-",
        "!2-,param-dtype=*",
    ),
    "torch_internals/test_tensor_parallel.py::test_what_is_estimated_is_what_two_processes_take": ("*",),
    "torch_internals/test_tensor_parallel.py::test_a_model_that_is_parallelized_says_its_mesh": ("*",),
    "torch_internals/test_tensor_parallel.py::test_what_a_plan_divides_takes_what_is_estimated": ("*",),
    "torch_internals/test_tensor_parallel.py::test_the_smallest_mesh_has_as_many_tensor_parallel_processes": ("*",),
    "torch_internals/test_two_dimensions.py::test_what_is_planned_before_runs_once_both_are_done": ("*",),
    "torch_internals/test_two_dimensions.py::test_a_plan_is_made_without_any_process_group": ("*",),
    "commands/test_together.py::test_a_process_that_is_killed_ends_the_other": ("*",),
    # Fewer splits, types and front ends of what is observed.
    "observe/test_kept.py::test_every_number_is_the_same": ("*-9", "*-(100, 12)"),
    "observe/test_kept.py::test_autocast": ("9-*", "(100, 12)-*"),
    "observe/test_effects.py::test_both_front_ends_see_the_same_storages_saved": ("*-bf16",),
    "observe/test_effects.py::test_inference_saves_nothing": ("*-dynamo", "!residual-*"),
    "observe/test_effects.py::test_reads_writes_and_saves": ("*-dynamo", "!conv2d-*", "!dropout-*"),
}


def is_slow(test: str) -> bool:
    """Whether the default run leaves out a test, named from ``tests/`` on as pytest names it: ``file::test[id]``."""
    name, _, case = test.partition("[")
    patterns = SLOW.get(name, ())
    slow, kept = ([p.removeprefix("!") for p in patterns if p.startswith("!") == kept] for kept in (False, True))

    def one_of(patterns: list[str]) -> bool:
        return any(fnmatchcase(case.removesuffix("]"), pattern) for pattern in patterns)

    return one_of(slow) and not one_of(kept)
