//! The small qwen3 model of `fixtures/oracle`, served.

use std::sync::{Arc, OnceLock};

use engine::{Engine, EngineOptions, Executor, LocalExecutor, Service};
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Limits, LoadOptions};
use server::{App, Config, LoadStage, ModelDescription, ServedModel};
use text::{GenerationDefaults, Tokenizer, TokenizerConfig};

use crate::oracle;

pub const MODEL: &str = "tiny-qwen3";

const LIMITS: Limits =
    Limits { step: StepLimits { rows: 256, sequences: 16, pages: 512 }, logit_rows: 64, kv_pages: 128, positions: 900 };

/// A model for all tests that do not check counters.
pub fn shared() -> Arc<ServedModel> {
    static SERVED: OnceLock<Arc<ServedModel>> = OnceLock::new();
    Arc::clone(SERVED.get_or_init(|| Arc::new(fresh(EngineOptions::default()))))
}

/// A new model, on one thread, because tests run in parallel.
pub fn fresh(options: EngineOptions) -> ServedModel {
    fresh_on(options, |local| local)
}

/// Like [`fresh`], with an executor that wraps the local one.
pub fn fresh_on<E: Executor + 'static>(
    options: EngineOptions,
    wrap: impl FnOnce(LocalExecutor<CpuBackend>) -> E,
) -> ServedModel {
    let folder = oracle("qwen3/model-f32");
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
    let load = LoadOptions { keep: None, limits: LIMITS };
    let executor = LocalExecutor::load(backend, &checkpoint, &load, &mut |_| {}).unwrap();
    let service = Service::start(Engine::with_options(wrap(executor), options)).unwrap();

    let config = TokenizerConfig::from_folder(&folder).unwrap();
    let defaults = GenerationDefaults::from_file(folder.join("generation_config.json")).unwrap();
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let tokenizer = tokenizer.with_eos_ids(defaults.eos_ids.iter().copied());
    let template = config.template().transpose().unwrap();
    let mut served = ServedModel::new(service, tokenizer, template, defaults).unwrap();
    served.description = ModelDescription {
        architecture: "qwen3".to_owned(),
        file_format: "safetensors".to_owned(),
        hidden: checkpoint.description().hidden,
        ..ModelDescription::default()
    };
    served
}

pub fn config() -> Config {
    Config { aliases: vec!["tiny".to_owned()], strict_names: true, ..Config::new(MODEL) }
}

/// A server whose model is ready.
pub fn ready(config: Config, served: Arc<ServedModel>) -> Arc<App> {
    let app = App::new(config);
    app.set_stage(LoadStage::Ready(served));
    app
}
