//! `/api/embed`, and its older form `/api/embeddings`.

use std::time::Instant;

use axum::Json;
use axum::extract::State;
use engine::Pooling;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::encoder::nanoseconds;
use super::request::OllamaKeepAlive;
use super::{KeepAlive, slot};
use crate::app::SharedApp;
use crate::blocking;
use crate::body_budget::BodyPermit;
use crate::error::ApiError;
use crate::error_responses::OllamaErrors;
use crate::generation::{CHOICES_MAX, EmbeddingOutput, embed_tokens, normalized, truncated_tokens};
use crate::json_body::JsonBody;
use crate::models::ModelUse;

/// The maximum texts of one request.
const TEXTS_MAX: usize = 2048;

/// Texts to embed. Fields that are not listed here are ignored.
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaEmbedRequest {
    /// Model name, with or without `:latest`
    pub model: String,
    pub input: Option<OllamaEmbedInput>,
    /// Cut a text that is longer than the context; true by default
    pub truncate: Option<bool>,
    /// Keep this many numbers of each vector, and scale them to length 1
    #[schema(maximum = 4_294_967_295_u32)]
    pub dimensions: Option<u32>,
    pub keep_alive: Option<OllamaKeepAlive>,
}

/// A text, or at most 2048 texts
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub enum OllamaEmbedInput {
    Text(String),
    Texts(Vec<String>),
}

#[derive(Serialize, ToSchema)]
pub struct OllamaEmbeddings {
    model: String,
    /// One vector of length 1 for each text
    embeddings: Vec<Vec<f32>>,
    /// Nanoseconds
    total_duration: u64,
    /// Nanoseconds; the model is loaded already
    load_duration: u64,
    prompt_eval_count: usize,
}

/// A text to embed, in the older form
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaEmbeddingRequest {
    /// Model name, with or without `:latest`
    pub model: String,
    pub prompt: Option<String>,
    pub keep_alive: Option<OllamaKeepAlive>,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaEmbedding {
    embedding: Vec<f32>,
}

/// Create embeddings
#[utoipa::path(
    post, path = "/api/embed", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaEmbedRequest,
    responses((status = 200, description = "One vector for each text", body = OllamaEmbeddings), OllamaErrors)
)]
pub async fn create(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<OllamaEmbedRequest>,
) -> Result<Json<OllamaEmbeddings>, ApiError> {
    let started = Instant::now();
    let slot = slot(&app, &request.model).await?;
    let model = KeepAlive::new(request.keep_alive.as_ref())?.acquire(&app, &slot).await?;
    let texts = match request.input {
        None => Vec::new(),
        Some(OllamaEmbedInput::Text(text)) if text.is_empty() => Vec::new(),
        Some(OllamaEmbedInput::Text(text)) => vec![text],
        Some(OllamaEmbedInput::Texts(texts)) => texts,
    };
    if texts.len() > TEXTS_MAX {
        return Err(ApiError::invalid("input", format!("there are more than {TEXTS_MAX} texts")));
    }
    let mut embedded = embed_texts(model, texts, request.truncate.unwrap_or(true), permit).await?;
    if let Some(dimensions) = request.dimensions.filter(|&dimensions| dimensions > 0) {
        let shorten = |mut vector: Vec<f32>| {
            vector.truncate(dimensions as usize);
            normalized(vector)
        };
        embedded.vectors = embedded.vectors.into_iter().map(shorten).collect();
    }
    Ok(Json(OllamaEmbeddings {
        model: request.model,
        embeddings: embedded.vectors,
        total_duration: nanoseconds(started.elapsed()),
        load_duration: 0,
        prompt_eval_count: embedded.prompt_tokens,
    }))
}

/// Create an embedding, in the older form
#[utoipa::path(
    post, path = "/api/embeddings", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaEmbeddingRequest,
    responses((status = 200, description = "The vector, of length 1", body = OllamaEmbedding), OllamaErrors)
)]
pub async fn create_one(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<OllamaEmbeddingRequest>,
) -> Result<Json<OllamaEmbedding>, ApiError> {
    let slot = slot(&app, &request.model).await?;
    let model = KeepAlive::new(request.keep_alive.as_ref())?.acquire(&app, &slot).await?;
    let texts = request.prompt.into_iter().filter(|prompt| !prompt.is_empty()).collect();
    let mut embedded = embed_texts(model, texts, true, permit).await?;
    Ok(Json(OllamaEmbedding { embedding: embedded.vectors.pop().unwrap_or_default() }))
}

/// The vectors of `texts`, of which there may be more than the engine takes at once.
async fn embed_texts(
    model: ModelUse,
    texts: Vec<String>,
    truncate: bool,
    permit: BodyPermit,
) -> Result<EmbeddingOutput, ApiError> {
    let tenant = permit.tenant();
    let prompts: Vec<_> = {
        let model = model.clone();
        // The engine takes prompts that are shorter than the context. One token more is refused.
        let tokens_max = if truncate { model.context - 1 } else { model.context };
        blocking::run(move || {
            let _permit = permit;
            texts.iter().map(|text| truncated_tokens(&model, text, tokens_max)).collect()
        })
        .await?
    };
    let mut all = EmbeddingOutput { vectors: Vec::with_capacity(prompts.len()), prompt_tokens: 0 };
    for prompts in prompts.chunks(CHOICES_MAX) {
        let embedded = embed_tokens(&model, prompts.to_vec(), Pooling::Mean, tenant).await?;
        all.vectors.extend(embedded.vectors);
        all.prompt_tokens += embedded.prompt_tokens;
    }
    Ok(all)
}
