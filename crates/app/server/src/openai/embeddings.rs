//! `/v1/embeddings`: converts texts to vectors of length 1.

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use engine::Pooling;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::completions::PromptField;
use crate::app::SharedApp;
use crate::error::ApiError;
use crate::error_responses::OpenAiErrors;
use crate::generation::embed;
use crate::json_body::JsonBody;

pub fn router() -> Router<SharedApp> {
    Router::new().route("/v1/embeddings", post(create))
}

/// Texts to embed. Fields that are not listed here are ignored.
#[derive(Debug, Deserialize, ToSchema)]
pub struct EmbeddingRequest {
    pub input: PromptField,
    /// Model name; the served model by default
    pub model: Option<String>,
    /// Numbers, or base64 of little-endian 32-bit floats
    pub encoding_format: Option<EncodingFormat>,
    /// Not supported: refused. The length of a vector is the model's hidden size
    pub dimensions: Option<usize>,
    /// How the hidden states of the tokens become one vector; `mean` by default
    pub pooling: Option<PoolingField>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    #[default]
    Float,
    Base64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PoolingField {
    #[default]
    Mean,
    Last,
}

#[derive(Serialize, ToSchema)]
pub struct EmbeddingList {
    /// Always `list`
    #[schema(value_type = String)]
    object: &'static str,
    data: Vec<EmbeddingObject>,
    model: String,
    usage: EmbeddingUsage,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Embedding)]
pub struct EmbeddingObject {
    /// Always `embedding`
    #[schema(value_type = String)]
    object: &'static str,
    index: usize,
    embedding: EmbeddingVector,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Vector)]
pub enum EmbeddingVector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Serialize, ToSchema)]
pub struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// Create embeddings
#[utoipa::path(
    post, path = "/v1/embeddings", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    request_body = EmbeddingRequest,
    responses(
        (status = 200, description = "One vector for each input", body = EmbeddingList),
        OpenAiErrors,
    )
)]
pub async fn create(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<EmbeddingRequest>,
) -> Result<Json<EmbeddingList>, ApiError> {
    let model = app.model(request.model.as_deref()).await?;
    if request.dimensions.is_some() {
        return Err(ApiError::unsupported("dimensions", "vectors are as long as the model makes them"));
    }
    let pooling = match request.pooling.unwrap_or_default() {
        PoolingField::Mean => Pooling::Mean,
        PoolingField::Last => Pooling::Last,
    };
    let prompts = request.input.into_prompts("input")?;
    let name = model.name().to_owned();
    let embedded = embed(model, prompts, pooling, permit).await?;
    let format = request.encoding_format.unwrap_or_default();
    let embedding = |(index, vector)| EmbeddingObject {
        object: "embedding",
        index,
        embedding: EmbeddingVector::new(vector, format),
    };
    let tokens = embedded.prompt_tokens;
    Ok(Json(EmbeddingList {
        object: "list",
        data: embedded.vectors.into_iter().enumerate().map(embedding).collect(),
        model: name,
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    }))
}

impl EmbeddingVector {
    fn new(vector: Vec<f32>, format: EncodingFormat) -> Self {
        match format {
            EncodingFormat::Float => Self::Float(vector),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = vector.into_iter().flat_map(f32::to_le_bytes).collect();
                Self::Base64(BASE64_STANDARD.encode(bytes))
            }
        }
    }
}
