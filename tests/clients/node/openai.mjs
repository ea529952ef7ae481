// The calls of OpenAI's own client for Node: node openai.mjs GRPC REST
import assert from 'node:assert/strict'
import OpenAI from 'openai'
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const client = new OpenAI({ baseURL: `http://${process.argv[3]}/v3`, apiKey: 'none', maxRetries: 0, timeout: 60_000 })
const City = z.object({ name: z.enum(['Paris', 'Berlin']), size: z.number().int().min(0).max(99) })
const asked = { model: 'chat', messages: [{ role: 'user', content: 'Describe Paris.' }], temperature: 0 }

const names = []
for await (const model of client.models.list()) names.push(model.id)
assert.deepEqual(names, ['chat', 'ranks', 'words'])

const whole = await client.chat.completions.create({ ...asked, max_completion_tokens: 12 })
let text = ''
let usage
const events = await client.chat.completions.create({
  ...asked,
  max_completion_tokens: 12,
  stream: true,
  stream_options: { include_usage: true },
})
for await (const event of events) {
  text += event.choices[0]?.delta.content ?? ''
  usage = event.usage ?? usage
}
assert.equal(text, whole.choices[0].message.content)
assert.equal(usage.completion_tokens, 12)
assert.equal((await client.chat.completions.stream({ ...asked, max_tokens: 12 }).finalContent()), text)

const format = zodResponseFormat(City, 'city')
const parsed = await client.chat.completions.parse({ ...asked, max_tokens: 120, response_format: format })
City.parse(parsed.choices[0].message.parsed)
for (const choice of ['required', { type: 'function', function: { name: 'city' } }]) {
  const tools = [zodFunction({ name: 'city', parameters: City })]
  const called = await client.chat.completions.parse({ ...asked, max_tokens: 150, tools, tool_choice: choice })
  City.parse(called.choices[0].message.tool_calls[0].function.parsed_arguments)
}

const response = await client.responses.create({ model: 'chat', input: 'Describe Paris.', max_output_tokens: 12, temperature: 0 })
assert.equal(response.output_text, text)
const streamed = client.responses.stream({ model: 'chat', input: 'Describe Paris.', max_output_tokens: 12, temperature: 0 })
assert.equal((await streamed.finalResponse()).output_text, text)

const completion = await client.completions.create({ model: 'chat', prompt: ['a', 'b'], max_tokens: 2 })
assert.equal(completion.choices.length, 2)
for (const encoding_format of ['float', 'base64', undefined]) {
  const made = await client.embeddings.create({ model: 'words', input: ['a cat', 'a dog'], encoding_format })
  assert.equal(made.data.length, 2)
}

await assert.rejects(client.chat.completions.create({ ...asked, model: 'nothing' }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError)
  return error.code === 'model_not_found'
})
await assert.rejects(client.chat.completions.create({ ...asked, temperature: 3 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError)
  return error.param === 'temperature'
})
const left = await client.chat.completions.create({ ...asked, max_tokens: 1500, stream: true })
for await (const _ of left) break
