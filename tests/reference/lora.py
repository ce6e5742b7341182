"""Makes what adapters are compared with, by PEFT. `make.py` calls it for the models that it has written.

For each model of `SETTINGS` a folder NAME/lora with adapters as PEFT writes them, and expected.safetensors:

losses          float32 [5], of each step of AdamW, the mean over all documents of NAME/expected.safetensors
after.NAME      float32, the tensors of the adapters after the last step
logits          float32 [600, vocabulary], of the first document, with these
"""

import json

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

STEPS, RATE, DECAY = 5, 1e-3, 0.1
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {
    "llama-a": {"r": 3, "lora_alpha": 6, "target_modules": ALL},
    "llama-b": {"r": 2, "lora_alpha": 3, "target_modules": ALL, "use_rslora": True},
    "mistral-a": {"r": 4, "lora_alpha": 4, "target_modules": ["gate_proj", "down_proj"]},
    "qwen2-a": {"r": 3, "lora_alpha": 6, "target_modules": ALL, "modules_to_save": ["lm_head", "model.norm"]},
    "qwen3-a": {"r": 5, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "gemma2-a": {"r": 3, "lora_alpha": 6, "target_modules": ALL},
    "gemma3-a": {"r": 3, "lora_alpha": 6, "target_modules": ALL},
    "olmo3-a": {"r": 3, "lora_alpha": 6, "target_modules": ALL},
    "gpt2-a": {"r": 3, "lora_alpha": 6, "target_modules": ["c_fc", "c_proj"], "fan_in_fan_out": True},
    "mixtral-a": {"r": 3, "lora_alpha": 6, "target_modules": ALL[:4]},
    "qwen3_moe-a": {"r": 3, "lora_alpha": 6, "target_modules": ALL[:4]},
}


def make(name, folder, seed):
    """Trains adapters beside the model in folder/NAME."""
    wanted = load_file(folder / name / "expected.safetensors")
    texts = wanted["tokens"].long().split(wanted["lengths"].tolist())
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / name, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **SETTINGS[name]))
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in sorted(model.named_parameters()):
        if "lora_B" in parameter_name:  # so that every matrix has a gradient from the first step on
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    out = folder / name / "lora"
    model.save_pretrained(out)
    (out / "README.md").unlink()
    settings = json.loads((out / "adapter_config.json").read_text()) | {"base_model_name_or_path": name}
    settings["target_modules"] = sorted(settings["target_modules"])
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    targets = sum(len(text) - 1 for text in texts)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = sum(_loss(model, text) for text in texts) / targets
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        logits = model(texts[0][None, :-1]).logits[0].float()
    after = peft.get_peft_model_state_dict(model)
    expected = {"losses": torch.stack(losses), "logits": logits.contiguous()}
    expected |= {f"after.{tensor_name}": tensor.detach().contiguous().clone() for tensor_name, tensor in after.items()}
    save_file(expected, out / "expected.safetensors")


def _loss(model, text):
    logits = model(text[None, :-1]).logits[0].float()
    return torch.nn.functional.cross_entropy(logits, text[1:], reduction="sum")
