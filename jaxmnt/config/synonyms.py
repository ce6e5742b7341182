"""Settings by the names that other programs give them, and by their own name in the wrong place."""

from collections.abc import Iterable
from typing import NamedTuple


class Meant(NamedTuple):
    """The key that somebody means."""

    key: str
    note: str = ""
    """How it differs from what was typed, if it does."""


_MICROBATCHES = "rows of a batch shard in one microbatch; their number follows from it"

_NAMES: dict[Meant, str] = {
    Meant("seed"): "random_seed rng_seed prng_seed",
    Meant("run.dir"): "output_dir out_dir run_dir work_dir workdir log_dir exp_dir experiment_dir run_name",
    Meant("run.init_from"): "init_checkpoint pretrained pretrained_model load_from load_checkpoint finetune_from",
    Meant("run.fork_from", "a run goes on by itself in the same run.dir"): (
        "resume resume_from resume_from_checkpoint ckpt_path auto_resume"
    ),
    Meant("train.steps"): (
        "max_steps num_steps n_steps total_steps num_train_steps train_steps training_steps max_iters train_iters "
        "num_iterations iterations total_iterations max_train_steps"
    ),
    Meant("train.steps", "an epoch is the data's tokens / (data.global_batch_size × data.sequence_length) steps"): (
        "epochs num_epochs n_epochs max_epochs num_train_epochs max_tokens total_tokens train_tokens"
    ),
    Meant("train.microbatch_size", _MICROBATCHES): (
        "micro_batch_size micro_batch microbatch microbatch_rows mbs device_batch_size per_device_batch_size "
        "per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size gradient_accumulation_steps "
        "gradient_accumulation grad_accum grad_accum_steps grad_accumulation_steps accumulation_steps accum_steps "
        "accumulate_grad_batches num_microbatches"
    ),
    Meant("train.precision"): (
        "dtype compute_dtype mixed_precision bf16 fp16 fp32 amp autocast half_precision use_bf16 torch_dtype"
    ),
    Meant("train.params_dtype"): "param_dtype parameter_dtype weight_dtype master_dtype",
    Meant("train.reduce_dtype"): "grad_dtype grads_dtype grad_reduce_dtype gradient_dtype",
    Meant("train.remat"): (
        "activation_checkpointing gradient_checkpointing checkpoint_activations activation_checkpoint "
        "recompute recompute_activations recompute_granularity rematerialization remat_policy"
    ),
    Meant("train.eval_every"): (
        "eval_steps eval_interval eval_freq eval_every_steps val_interval val_every val_check_interval "
        "validation_interval validate_every"
    ),
    Meant("data.path"): (
        "dataset dataset_path dataset_name dataset_dir data_path data_dir data_root train_data train_data_path "
        "train_file train_files"
    ),
    Meant(
        "data.global_batch_size"
    ): "batch_size batch global_batch train_batch_size batch_rows total_batch_size bs gbs",
    Meant("data.sequence_length"): (
        "seq_len seq_length seqlen sequence_len max_seq_len max_seq_length max_sequence_length max_length "
        "context_length context_len context_size ctx_len n_ctx block_size max_position_embeddings window"
    ),
    Meant(
        "data.read_threads"
    ): "num_workers workers n_workers dataloader_num_workers dataloader_workers loader_workers",
    Meant("data.rows", "packed or windows"): "packing pack packed sample_packing sequence_packing",
    Meant("model.num_layers"): "n_layers n_layer num_layer num_hidden_layers layers depth n_blocks num_blocks",
    Meant("model.hidden_size"): (
        "d_model model_dim dim n_embd n_embed embed_dim emb_dim embedding_dim embedding_size embed_size d_embed "
        "hidden_dim hidden width d_hidden"
    ),
    Meant("model.num_heads"): "n_heads n_head num_attention_heads heads num_head attention_heads num_q_heads",
    Meant("model.num_kv_heads"): "n_kv_heads num_key_value_heads kv_heads num_query_groups n_kv_head",
    Meant("model.head_dim"): "d_head head_size dim_head kv_channels",
    Meant(
        "model.intermediate_size"
    ): "d_ff d_mlp ffn_dim ff_dim mlp_dim ffn_hidden_size intermediate_dim mlp_hidden_size",
    Meant("model.vocab_size"): "n_vocab vocab vocabulary_size padded_vocab_size vocab_dim num_embeddings",
    Meant("model.tie_embeddings"): "tie_word_embeddings tied_embeddings tie_weights weight_tying tie_embedding",
    Meant("model.norm_epsilon"): "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon",
    Meant("model.rope_theta"): "rope_base rotary_base rotary_emb_base theta",
    Meant(
        "model.dropout"
    ): "dropout_rate dropout_p dropout_prob hidden_dropout resid_dropout attention_dropout resid_pdrop",
    Meant("model.attention"): (
        "flash_attention use_flash_attention flash attn attn_implementation attention_kernel attn_impl attention_impl"
    ),
    Meant("optimizer.learning_rate"): "lr learningrate max_lr peak_lr base_lr learning_rates",
    Meant(
        "optimizer.warmup_steps"
    ): "warmup warmup_iters lr_warmup_steps num_warmup_steps lr_warmup_iters n_warmup_steps",
    Meant("optimizer.warmup_steps", "a number of steps"): "warmup_ratio warmup_fraction lr_warmup_fraction",
    Meant("optimizer.schedule"): (
        "lr_schedule lr_scheduler scheduler lr_scheduler_type lr_decay_style learning_rate_schedule scheduler_type"
    ),
    Meant("optimizer.final_fraction", "the last learning rate as a share of the peak"): (
        "min_lr lr_min final_lr end_lr eta_min min_lr_ratio min_learning_rate"
    ),
    Meant("optimizer.decay_fraction", "a share of the steps"): "decay_steps decay_ratio lr_decay_steps lr_decay_iters",
    Meant("optimizer.weight_decay"): "wd l2",
    Meant("optimizer.beta1"): "b1 beta_1 adam_beta1 adam_b1 betas adam_betas",
    Meant("optimizer.beta2"): "b2 beta_2 adam_beta2 adam_b2",
    Meant("optimizer.epsilon"): "eps adam_eps adam_epsilon",
    Meant("optimizer.clip_norm"): (
        "grad_clip gradient_clip gradient_clipping clip_grad clip_grad_norm max_grad_norm gradient_clip_val "
        "clip_gradient clip_gradients grad_clip_norm max_norm grad_norm_clip clip"
    ),
    Meant("checkpoint.dir"): "checkpoint_dir ckpt_dir save_dir checkpoint_path save_path",
    Meant("checkpoint.every_steps"): (
        "save_every save_every_steps save_steps save_interval save_freq ckpt_every ckpt_interval checkpoint_every "
        "checkpoint_interval checkpoint_every_steps interval every"
    ),
    Meant("checkpoint.every_minutes"): "save_minutes save_every_minutes checkpoint_minutes minutes",
    Meant(
        "checkpoint.keep"
    ): "save_total_limit keep_last keep_last_n max_to_keep keep_checkpoints keep_latest_k save_top_k",
    Meant("mesh.data"): (
        "dp ddp data_parallel data_parallel_size data_parallelism dp_size data_parallel_replicate_degree num_replicas"
    ),
    Meant("mesh.fsdp"): "fsdp_size fully_sharded shard sharding dp_shard data_parallel_shard_degree fsdp_parallelism",
    Meant("mesh.zero"): "zero_stage stage zero_optimization",
    Meant("mesh.model"): (
        "tp tp_size tensor tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree "
        "tensor_parallelism model_parallel model_parallel_size mp sp sequence_parallel sequence_parallelism"
    ),
    Meant("mesh.pipeline"): (
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree "
        "pipeline_parallelism pipeline_stages num_stages stages"
    ),
    Meant("mesh.context", "must be 1 in this version"): (
        "cp cp_size context_parallel context_parallel_size context_parallel_degree context_parallelism ring_attention"
    ),
    Meant("mesh.expert", "must be 1 in this version"): (
        "ep ep_size expert_parallel expert_parallel_size expert_model_parallel_size expert_parallelism num_experts"
    ),
    Meant("pipeline.chunks"): "virtual_stages num_virtual_stages num_chunks virtual_pipeline_model_parallel_size",
    Meant("launch.nodes"): "num_nodes n_nodes nnodes num_hosts hosts",
    Meant("launch.gpus_per_node"): "gpus num_gpus n_gpus ngpus nproc_per_node num_gpus_per_node gpus_per_host",
    Meant("launch.hours"): "time walltime time_limit wall_time",
    Meant("launch.environment"): "env env_vars environment_variables",
    Meant("launch.image"): "container docker docker_image container_image",
}
"""What each is called elsewhere."""

SECTIONS: dict[str, str] = {
    name: section
    for section, names in {
        "train": "training trainer train_config loop",
        "optimizer": "optim opt adam adamw optimiser lr_scheduler scheduler training_optimizer",
        "model": "transformer network architecture model_config llm gpt llama",
        "data": "dataset dataloader datasets data_loader train_data input",
        "mesh": "parallel parallelism distributed sharding strategy parallel_config",
        "checkpoint": "ckpt checkpointing checkpoints saving",
        "run": "experiment project",
        "cluster": "rendezvous dist",
        "launch": "launcher job",
    }.items()
    for name in names.split()
}
"""Sections by other names."""

_MEANT = {name: meant for meant, names in _NAMES.items() for name in names.split()}


def setting_for(name: str, section: str = "") -> Meant | None:
    """The key that is called `name` elsewhere, or that has this name in another section than `section`.

    A key of the section itself comes before the same word's meaning in others.
    """
    plain = name.lower().replace("-", "_")
    meant, own = _MEANT.get(plain), list(_places(plain))
    if meant and (meant.key.startswith(f"{section}.") or not own):
        return meant
    return Meant(" or ".join(own)) if own else None


def _places(name: str) -> Iterable[str]:
    """Every key of a section that has this name."""
    from jaxmnt.config.schema import Config

    for key, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if inner is None and key == name:
            yield key
        elif inner and name in inner:
            yield f"{key}.{name}"
