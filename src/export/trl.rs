//! What TRL's `rollout_func` returns for one prompt, a line each.

use serde::Serialize;
use serde_json::{Map, Value};

use super::rows::Row;

#[derive(Serialize)]
pub(super) struct Line<'a> {
    prompt_ids: &'a [u32],
    completion_ids: &'a [u32],
    /// Behind the prompt; 0 where the mask is 0.
    logprobs: Vec<f32>,
    /// 1: sampled by the policy, and trained.
    env_mask: Vec<u8>,
    #[serde(flatten)]
    columns: Map<String, Value>,
}

pub(super) fn line<'a>(row: &'a Row<'_>) -> Line<'a> {
    let (prompt_ids, completion_ids) = row.sample.token_ids.split_at(row.prompt_len());
    let env_mask = row.mask().map(u8::from).collect();
    Line { prompt_ids, completion_ids, logprobs: row.logprobs().collect(), env_mask, columns: row.columns() }
}
