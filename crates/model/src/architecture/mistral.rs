//! Mistral 7B and its kin: Llama's layer; in the first version every layer sees only a window of positions.

use kernels::Activation;

use super::{Architecture, llama};
use crate::description::{Description, DescriptionError};
use crate::facts::{Key, ModelMetadata};

pub static MISTRAL: Architecture = Architecture {
    name: "mistral",
    aliases: &[],
    gguf: None,
    tensors: &llama::TENSORS,
    activation: Activation::Silu,
    defaults: &[("num_key_value_heads", 8)],
    tied: false,
    refine,
};

/// The window that transformers assumes when config.json does not mention one; `null` means none.
const WINDOW: usize = 4096;

fn refine(facts: &ModelMetadata<'_>, description: &mut Description) -> Result<(), DescriptionError> {
    let window = if facts.mentions(Key::WINDOW) { facts.count_if(Key::WINDOW)? } else { Some(WINDOW) };
    description.slide_every_layer(window);
    Ok(())
}
