// The calls of Ollama's own client for Node: node ollama.mjs GRPC REST
import assert from 'node:assert/strict'
import { Ollama } from 'ollama'

const client = new Ollama({ host: `http://${process.argv[3]}` })
const options = { temperature: 0, num_predict: 12 }
const asked = { model: 'chat', messages: [{ role: 'user', content: 'Describe Paris.' }], options }
const schema = {
  type: 'object',
  properties: { name: { enum: ['Paris', 'Berlin'] } },
  required: ['name'],
  additionalProperties: false,
}

const whole = await client.chat(asked)
assert.equal(whole.done_reason, 'length')
let text = ''
let last
for await (const part of await client.chat({ ...asked, stream: true })) {
  text += part.message.content
  last = part
}
assert.equal(text, whole.message.content)
assert.equal(last.eval_count, 12)
text = ''
for await (const part of await client.generate({ model: 'chat', prompt: 'Describe Paris.', options, stream: true })) {
  text += part.response
}
assert.equal(text, whole.message.content)
const city = await client.chat({ ...asked, options: { num_predict: 150 }, format: schema, keep_alive: '5m' })
assert.ok(['Paris', 'Berlin'].includes(JSON.parse(city.message.content).name))
const messages = [
  ...asked.messages,
  { role: 'assistant', content: '', tool_calls: [{ function: { name: 'city', arguments: { name: 'Paris' } } }] },
  { role: 'tool', content: 'stored', tool_name: 'city' },
]
const tool = { type: 'function', function: { name: 'city', description: 'Store a city.', parameters: schema } }
await client.chat({ ...asked, messages, tools: [tool], think: false })

const names = (await client.list()).models.map((model) => model.name)
assert.ok(names.includes('chat') && names.includes('words'))
assert.equal((await client.ps()).models.length, names.length)
assert.ok((await client.show({ model: 'chat' })).capabilities.includes('tools'))
assert.ok((await client.version()).version)
assert.equal((await client.embed({ model: 'words', input: ['a cat', 'a dog'] })).embeddings.length, 2)
assert.ok((await client.embeddings({ model: 'words', prompt: 'a cat' })).embedding.length)

await assert.rejects(client.chat({ ...asked, model: 'nothing' }), /does not exist/)
await assert.rejects(client.chat({ ...asked, options: { mirostat: 2 } }), /mirostat is not supported/)
const left = await client.chat({ ...asked, options: { num_predict: 1500 }, stream: true })
for await (const _ of left) break
left.abort()
